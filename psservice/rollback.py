"""Going back: a shard becomes what it was at a version or in a checkpoint, under a new generation."""

import logging

from pscore.generation import sibling_generation
from psservice.shard.model import ModelShard
from psservice.shardstate import ShardState

log = logging.getLogger(__name__)


def roll_back(state: ShardState, version: int | None, checkpoint: str) -> ModelShard:
    """Go back to a version or a checkpoint, as a new generation, which workers pull by themselves.

    What is remembered of pushes stays, so that the repeat of one that was rolled back is not applied anew.

    Raises:
        Refusal: ``BAD_REQUEST``, where it is not kept; ``NOT_DURABLE``.
    """
    state.require_model(None)
    history = state.persistence.look_back(state, version, checkpoint)

    def install() -> ModelShard:
        with state.join_lock:
            old = state.require_model(None)
            before = state.model, state.buffers, state.run.state, state.run.samples
            datasets, state.datasets = state.datasets, history.datasets
            # Of the same epoch: shards go back one by one, and one may be refused; workers wait for equal epochs.
            history.model.generation = sibling_generation(old.generation)
            history.model.begin_rounds_anew(old.waiting())
            state.model, state.buffers = history.model, history.buffers
            state.run.state, state.run.samples = history.run_state, history.samples
            try:
                state.persistence.take_inside(state)
            except BaseException:
                state.model, state.buffers, state.run.state, state.run.samples = before
                state.datasets = datasets
                raise
            state.membership.reset_downlinks()
            state.metrics.version.set(history.model.version)
            log.warning("rolled back", extra={"from": old.version, "to": history.model.version})
            return history.model

    return state.writer.run(install)
