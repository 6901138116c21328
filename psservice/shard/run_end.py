"""The end of a run: pushes are refused from then on, and the final model is written."""

import logging
from collections.abc import Callable

from psservice.cluster.run import RunState
from psservice.model.parameters import ModelShard
from psservice.recovery.final_model import FinalModel, ModelCopy
from psservice.shard.state import ShardState

log = logging.getLogger(__name__)


class RunEnd:
    """Ends the run of a shard, once.

    Args:
        state: the shard.
        close_round: closes the round that is open, on the writer thread.
    """

    def __init__(self, state: ShardState, close_round: Callable[[ModelShard], None]) -> None:
        """Nothing has ended."""
        self._state, self._close_round = state, close_round
        settings = state.settings
        self._final_model = FinalModel(
            settings.final_model, settings.shard_index, settings.num_shards, state.environment
        )

    def finish(self) -> str:
        """End the run, write the final model if asked to, and return its path."""
        state = self._state
        state.require_model(None)
        state.writer.run(self.come)
        state.persistence.events.wait()
        return self._final_model.wait()

    def wait(self) -> None:
        """Wait for the final model, if it is being written."""
        self._final_model.wait()

    def round_closed(self, model: ModelShard) -> None:
        """End the run where a closed round has brought it there; on the writer thread."""
        if self._state.run.is_over(model.version):
            self.come()

    def come(self) -> None:
        """End the run; on the writer thread, so that the final model is the one at the last version.

        Where it has ended and that model could not be written, try that again.
        """
        state = self._state
        model = state.require_model(None)
        if not state.run.is_finished:
            self._close_round(model)  # may be what ends the run
        if state.run.is_finished:
            if self._final_model.has_failed:  # a full disk may have room by now
                self._write_final_model(model)
            return
        state.persistence.events.finished(state.run.run_id)
        with state.writer.all_or_stop():
            state.run.state = RunState.FINISHED
            model.finish()
        log.info("run finished", extra={"version": model.version, "samples": state.run.samples})
        self._write_final_model(model)

    def come_again(self) -> None:
        """After a restart, do what the end of the run was to do: the server may have died in the middle of it."""
        state = self._state
        if state.model is None:
            return
        if state.run.state is RunState.TRAINING and state.run.is_over(state.model.version):
            state.writer.run(self.come)
        elif state.run.state is RunState.FINISHED and not self._final_model.is_there(
            state.run.run_id, state.model.version
        ):
            self._write_final_model(state.model)

    def _write_final_model(self, model: ModelShard) -> None:
        buffers = self._state.buffers
        self._final_model.begin(
            lambda: ModelCopy(model, model.version, model.current(), buffers.state() if buffers else {}),
            self._state.run.run_id,
        )
