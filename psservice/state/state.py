"""The state of a shard at one version, and how a record changes it.

A running shard decides what a request does, as a record, writes the record to the journal, and applies it. A recovery
applies the same records. Nothing else changes the state, so both end in the same one, bit for bit.
"""

import time
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

from pscore.model.buffers import unpack
from pscore.model.layout import ModelLayout
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.messages import share_from_messages
from psservice.data_leases.dataset import Datasets, Plan, SampleRequest
from psservice.feed.relayed_shard import RelayedShard
from psservice.feed.staged_shard import StagedShard
from psservice.model.buffers import BufferAverage
from psservice.model.parameters import GroupDecision, ModelShard
from psservice.model.training_mode import TrainingMode
from psservice.rules.base import PushContext
from psservice.state.histories import Histories
from psservice.state.pushes import Pushes
from psservice.state.records import Record, identity_of, shard_history_of
from psservice.state.run import Run, RunState, added
from psservice.state.v1 import journal_pb2 as rec
from psservice.state.workers import Workers
from psservice.values import PushAnswer


class ShardState:
    """One shard at one version. Belongs to the apply thread; other threads read single values.

    Attributes:
        layout: the model's, from the first join on.
        mode: what the run's method asks of the server.
        model: the shard's part of it; ``None`` before the upload.
        buffers: their average; on shard 0 only, if the run has any.
        histories: of versions: the shard's own, and what it knows of the other shards'.
    """

    def __init__(self, run: Run, seconds: Callable[[], float]) -> None:
        self.run = run
        self.layout: ModelLayout | None = None
        self.mode = TrainingMode()
        self.model: ModelShard | None = None
        self.buffers: BufferAverage | None = None
        self.datasets = Datasets()
        self.histories = Histories()
        self.pushes, self.workers = Pushes(seconds), Workers()

    def with_model(
        self,
        model: ModelShard,
        buffers: BufferAverage | None,
        datasets: Datasets,
        *,
        run_id: str,
        run_state: RunState,
        samples: int,
    ) -> "ShardState":
        """Return the state with another model, buffers and datasets; pushes and workers are the same objects.

        What is known of other shards is forgotten.
        """
        state = copy(self)
        state.run = copy(self.run)
        state.run.run_id, state.run.state, state.run.samples = run_id, run_state, samples
        state.layout, state.mode, state.model = model.layout, model.mode, model
        state.buffers, state.datasets, state.histories = buffers, datasets, Histories()
        return state

    def apply(self, record: Record, update: SparseSlice | None = None) -> PushAnswer | None:
        """Change the state as a record says; return the answer of a push.

        ``update`` has the entries of a push or a relayed version, on the model's device. Raises
        :class:`~pscore.wire.errors.Rejected` if the model refuses a push: nothing is changed then, now and in each
        replay. Raises ``ValueError`` if the record does not belong behind this state.
        """
        if isinstance(record, rec.Pushed):
            return self._push(record, update)
        if isinstance(record, rec.Relayed):
            self._relay(record, update)
            return None
        _APPLY[type(record)](self, record)
        return None

    def _push(self, record: rec.Pushed, update: SparseSlice | None) -> PushAnswer:
        model, identity = self._model(), identity_of(record.worker)
        expected = model.generation, model.version_after(record.base_version)
        if (record.generation, record.version) != expected or record.version <= model.version:
            raise ValueError(
                f"it is version {record.version} of generation {record.generation}, and follows version "
                f"{model.version} of {model.generation}"
            )
        started = time.perf_counter_ns()
        rates, name = tuple(record.group_rates), f"{record.step}:{identity.incarnation}"
        context = PushContext(record.base_version, record.learning_rate, record.samples, rates, name)
        finished = {each.dataset: share_from_messages(each.places) for each in record.finished}
        datasets = self.datasets.finish(identity, finished) if finished else {}
        model.take(identity.worker_id, update, context, record.step)
        answer = PushAnswer(record.version, record.staleness, time.perf_counter_ns() - started)
        own = self.pushes.find(identity).own
        if model.mode.rounds is None:
            own = own.noted(record.generation, record.base_version, record.version)
        self.pushes.push(identity, record.step, answer, own)
        self.datasets.update(datasets)
        self.workers.push(identity)
        self.run.samples = added(self.run.samples, record.samples)
        return answer

    def _relay(self, record: rec.Relayed, update: SparseSlice | None) -> None:
        model = self._model()
        if not isinstance(model, RelayedShard):
            raise ValueError("the shard relays nothing")
        if record.whole:
            if update is None or update.offsets is not None:
                raise ValueError("a whole version has all values")
            model.stage_whole(record.generation, record.version, record.name, update.values, record.buffers)
            return
        base = model.base(record.generation, record.before)
        if base is None or record.version < record.before:
            raise ValueError(
                f"it leads from version {record.before} of generation {record.generation} to {record.version}, and the "
                f"shard has version {model.version} of {model.generation}"
            )
        model.stage(base, record.version, record.name, update, record.buffers)

    def _average(self, record: rec.Averaged) -> None:
        if self.buffers is None:
            raise ValueError("the shard keeps no buffers")
        self.buffers.contribute(record.buffers, record.samples, record.live_workers)
        self.pushes.exchange(identity_of(record.worker), record.step)

    def _join(self, record: rec.Joined) -> None:
        self.workers.join(identity_of(record.worker), frozenset(record.index_codecs))

    def _leave(self, record: rec.Left) -> None:
        self.workers.leave(identity_of(record.worker))

    def _wait(self, record: rec.Waited) -> None:
        self.workers.begin_wait(identity_of(record.worker), record.number)

    def _forget(self, record: rec.Forgot) -> None:
        self.pushes.forget(map(identity_of, record.workers))

    def _name_run(self, record: rec.RunNamed) -> None:
        self.run.run_id = record.run_id

    def _finish(self, record: rec.Finished) -> None:
        self.run.state = RunState.FINISHED
        self._model().finish()

    def _close_round(self, record: rec.RoundClosed) -> None:
        model = self._model()
        if record.version != model.version + 1:
            raise ValueError(f"a round that makes version {record.version} follows version {model.version}")
        model.close_round()

    def _publish(self, record: rec.Published) -> None:
        model = self._model()
        if not isinstance(model, StagedShard) or not model.staged.is_there or record.version != model.staged.version:
            raise ValueError(f"version {record.version} is not staged")
        buffers = model.staged.buffers
        model.publish()
        if buffers:
            self.buffers = with_buffers(self.buffers, model.layout, buffers)

    def _decide_groups(self, record: rec.GroupDecided) -> None:
        worker = record.worker
        self._model().decide(_GROUPS[record.kind], worker.worker_id, worker.incarnation, record.iteration)

    def _know(self, record: rec.Known) -> None:
        self.histories.apply(map(shard_history_of, record.histories))

    def _lease_samples(self, record: rec.SamplesLeased) -> None:
        request = SampleRequest(
            record.dataset,
            Plan(record.size, record.seed, record.shuffle),
            record.epoch if record.HasField("epoch") else None,
            0,
            share_from_messages(record.held),
        )
        gone = frozenset(map(identity_of, record.gone))
        self.datasets.apply(identity_of(record.worker), request, share_from_messages(record.granted), gone)

    def _model(self) -> ModelShard:
        if self.model is None:
            raise ValueError("the shard has no model")
        return self.model


def with_buffers(average: BufferAverage | None, layout: ModelLayout, packed: bytes) -> BufferAverage:
    """Return buffers with other values, packed in their own dtypes; those that are there are changed."""
    if average is None:
        return BufferAverage(layout.buffers, unpack(packed, layout.buffers))
    average.replace(packed)
    return average


_GROUPS: Mapping[int, GroupDecision] = {
    rec.GroupDecided.KIND_ENTER: "enter",
    rec.GroupDecided.KIND_LEAVE: "leave",
    rec.GroupDecided.KIND_FREEZE: "freeze",
}

_APPLY: Mapping[type, Callable[[ShardState, Any], None]] = {
    rec.Averaged: ShardState._average,
    rec.Joined: ShardState._join,
    rec.Left: ShardState._leave,
    rec.Waited: ShardState._wait,
    rec.Forgot: ShardState._forget,
    rec.RunNamed: ShardState._name_run,
    rec.Finished: ShardState._finish,
    rec.RoundClosed: ShardState._close_round,
    rec.Published: ShardState._publish,
    rec.GroupDecided: ShardState._decide_groups,
    rec.Known: ShardState._know,
    rec.SamplesLeased: ShardState._lease_samples,
}
