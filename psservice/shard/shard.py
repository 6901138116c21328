"""A shard: the parts of which it is composed, and the model that they work on.

What is done with a shard is in the files beside this one: joining, pushes, pulls, installing a model, the run's end.
"""

import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pscore.model.layout import Span
from pscore.model.modelfile import StateDict
from pscore.model.sparse_slice import SparseSlice
from pscore.selection import SELECTORS
from pscore.wire.codecs.names import VALUE_CODECS
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.layouts import OncePerLayout, pack_layout
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.apply_thread import ApplyThread
from psservice.cuts.cuts import Cuts
from psservice.durability.capture import layout_json
from psservice.durability.durability import Durability, Prepared
from psservice.durability.final_model import FinalModel, ModelCopy
from psservice.feed.relaying import Relaying
from psservice.feed.staged_shard import StagedShard
from psservice.membership.admission import Admission, DrainGate
from psservice.membership.leases import Leases, ServingClock
from psservice.memory_budget import Kept, MemoryBudget, default_limit
from psservice.model.copies import CopyOnWrite
from psservice.model.parameters import ModelShard
from psservice.observability.metrics import Metrics
from psservice.replies.reply_mode import ReplyRule
from psservice.replies.topk import TopKSettings
from psservice.rounds.round_shard import RoundShard
from psservice.rounds.synchronizer import RoundSynchronizer
from psservice.settings import ServerSettings
from psservice.shard.progress import Progress
from psservice.shard.upload import Uploads
from psservice.state.records import Record
from psservice.state.run import Run
from psservice.state.state import ShardState
from psservice.storage.environment import Environment
from psservice.storage.journal_format import EMPTY, Body
from psservice.synchronizer import Synchronizer
from psservice.values import Identity, PushAnswer
from psservice.wagma.replicas import GroupedShard
from psservice.wagma.synchronizer import WagmaSynchronizer


@dataclass(frozen=True, slots=True)
class Rollback:
    """An older model that is written down and not served yet.

    Attributes:
        ticket: names it, for the next step.
        version, generation: of the older model.
        publication: that the older model is; empty if the run is no feed.
        checkpoint: by which it was named; empty if by its version.
        before: the version that is served.
        hold_end: when the shard goes on without it, by the clock of its environment.
    """

    ticket: str
    prepared: Prepared
    version: int
    generation: int
    publication: str
    checkpoint: str
    before: int
    hold_end: float


class End(NamedTuple):
    """The end of a run, as shard 0 has told of it.

    Attributes:
        worker, step: the push that has ended the run; of an empty name if none has.
        generation: of shard 0's model.
    """

    worker: Identity
    step: int
    generation: int


class Shard:
    """One shard of one run; :func:`psservice.shard.lifecycle.open_shard` makes and recovers it (``StorageError``).

    Attributes:
        state: what snapshots and records keep, and what records alone change.
        synchronizer: of rounds or groups; ``None`` in an asynchronous run, and before the upload.
        cuts: versions that readers follow.
        memory: what calls occupy, and what is kept for them and for workers.
        packed, layout_json: return the layout as it travels, and as snapshots have it.
        progress: how the shards fare, for people to see.
        news: a number that differs once there are news for the other shards; see :meth:`tell_shards`.
        published: the version of a feed or a relay that is durable on shard 0, so that the other shards may publish it,
            and the name under which it was staged.
        rollback: that is prepared, while the shard holds.
        last_push: that ended the run on shard 0: its worker and step.
        ends_with: the run's end, as another shard heard of it from shard 0.
        undone_end: shard 0's generation in the end before which this shard has gone back; 0 if there is none.
        relaying: how a relay follows its source; ``None`` on other servers.
        lease_ends: the thread that ends leases by the clock, once the shard is open.
        installing: whether another model is on its way in: joining workers wait for it. Set under ``join_lock``.
        join_lock: held while a worker joins, while ends of leases are journaled, and while the model is replaced.
    """

    def __init__(
        self,
        settings: ServerSettings,
        device: torch.device,
        metrics: Metrics,
        on_health: Callable[[], None],
        on_failure: Callable[[], None],
        environment: Environment,
    ) -> None:
        self.settings, self.device, self.metrics, self.environment = settings, device, metrics, environment
        self.drain_gate = DrainGate()
        self.is_coordinator = settings.shard_index == 0
        self.leases = Leases(
            settings.lease_seconds,
            lambda: ReplyRule(settings.down_mode, settings.exact_limit),
            ServingClock(settings.lease_seconds / 4, environment.monotonic),
        )
        self.state = self.new_state()
        self.admission = Admission(settings.max_staleness, settings.ssp_bound if self.is_coordinator else 0)
        self.memory = MemoryBudget(
            settings.memory_bytes or default_limit(0), self._kept, self._sum_bytes, self._forget_replies
        )
        self.packed: OncePerLayout[pb.PackedLayout] = OncePerLayout(pack_layout)
        self.layout_json: OncePerLayout[dict[str, Any]] = OncePerLayout(layout_json)
        self.topk = TopKSettings(
            settings.down_density,
            settings.down_dense_below,
            SELECTORS[settings.down_selector],
            VALUE_CODECS[settings.down_value_type],
            settings.chunk_bytes,
            self.memory,
        )
        self._replaced: list[weakref.ref[CopyOnWrite]] = []  # copies of models that are not served any more
        self.uploads = Uploads(self.leases, settings.stream_idle_seconds)
        self.final_model = FinalModel(settings.final_model, settings.shard_index, settings.num_shards, environment)
        self.apply_thread = ApplyThread(metrics.queue_seconds.observe, on_failure, environment)
        self.synchronizer: Synchronizer | None = None
        self.join_lock = threading.Lock()
        self.stopping = threading.Event()
        self.lease_ends: threading.Thread | None = None
        self.installing = False
        self.published = (0, "")
        self.rollback: Rollback | None = None
        self.news = 0
        self._news = itertools.count(1)
        self.last_push: tuple[Identity, int] | None = None
        self.ends_with: End | None = None
        self.undone_end = 0
        self.durability = Durability(self, on_health, self.tell_shards, self.leases.waiters.recorded)
        self.relaying: Relaying | None = None
        if settings.relay_of:
            identity = environment.random_bytes(8).hex()
            self.relaying = Relaying(settings.num_shards, identity, environment.monotonic)
        self.cuts = Cuts(self, settings.cut_seconds, settings.num_shards)
        self.progress = Progress(environment.monotonic)

    def new_state(self) -> ShardState:
        """Return the state of a shard without a model."""
        settings = self.settings
        run = Run(
            settings.run_id,
            coordinator=self.is_coordinator,
            end_versions=settings.end_versions if self.is_coordinator else 0,
            end_samples=settings.end_samples if self.is_coordinator else 0,
        )
        return ShardState(run, lambda: self.leases.clock())

    @property
    def span(self) -> Span:
        """The shard's part of the layout; raises :class:`Rejected` (``NOT_INITIALISED``) before the first join."""
        if (model := self.model) is not None:
            return model.span
        if self.state.layout is None:
            raise Rejected(ErrorCode.NOT_INITIALISED, "no worker has joined yet, so the model is not known")
        return self.state.layout.shard_spans(self.settings.num_shards)[self.settings.shard_index]

    @property
    def value_dtype(self) -> torch.dtype:
        """In which dtype the shard has its values: fp32, or that of a feed's words."""
        return torch.float32 if self.state.layout is None else self.state.layout.value_dtype

    @property
    def model(self) -> ModelShard | None:
        """The shard's part of the model, from the upload on."""
        return self.state.model

    @property
    def run(self) -> Run:
        """The run, as this shard sees it."""
        return self.state.run

    @property
    def replaced_by(self) -> int:
        """The generation of a standby that has taken this shard's place; 0 if none has."""
        model = self.model
        return 0 if model is None else self.state.histories.successor(self.settings.shard_index, model.generation)

    def is_alone(self, identity: Identity) -> bool:
        """Tell whether there is no model and no worker but this one, which may then change what was agreed on."""
        return (
            self.model is None
            and not self.installing
            and all(member.identity == identity for member in self.leases.members())
        )

    def require_model(self, generation: int | None) -> ModelShard:
        """Return the model; raises :class:`Rejected` if there is none, or one of another generation."""
        model = self.state.model
        if model is None:
            raise Rejected(ErrorCode.NOT_INITIALISED, "no worker has uploaded a model yet")
        if generation is not None and generation != model.generation:
            raise Rejected(
                ErrorCode.STALE_GENERATION, f"the caller has generation {generation}, the server {model.generation}"
            )
        return model

    def commit(self, record: Record, update: SparseSlice | None = None, messages: Body = EMPTY) -> PushAnswer | None:
        """Write a record down, then apply it; on the apply thread. ``messages`` are those of a push's stream.

        Raises :class:`Rejected`: ``NOT_DURABLE`` if the record cannot be written, or what the state refuses.
        """
        self.durability.records.append(record, messages)
        try:
            answer = self.state.apply(record, update)
        except Rejected:
            raise
        except BaseException as error:  # it is written down already
            self.apply_thread.fail(error)
            raise
        if answer is None:
            self.leases.waiters.wake()
        return answer

    def change(self, record: Record) -> None:
        """Commit a record that a replaced model does not concern; from any thread. Raises as :meth:`commit`."""
        self.apply_thread.run(lambda: self.commit(record), while_held=True)

    def tell_shards(self) -> None:
        """Have the calls of other shards answered, because there are news for them; from any thread."""
        self.news = next(self._news)
        self.leases.waiters.wake()

    def serve(self, state: ShardState) -> None:
        """Replace the state; while nothing is served, or the apply thread is held."""
        if (replaced := self.model) is not None:
            replaced.forget_replies()  # or they would keep it, and it them
            still_read = [each for each in self._replaced if each() is not None]
            self._replaced = [*still_read, weakref.ref(replaced.copies)]
        self.cuts.forget()
        self.state = state
        assert state.model is not None
        self.synchronizer = self._synchronizer_for(state.model)
        self.metrics.version = state.model.version
        self.published = state.model.staged.published if isinstance(state.model, StagedShard) else (0, "")
        if self.relaying is not None:
            self.relaying.publish(self.published[1])

    def _synchronizer_for(self, model: ModelShard) -> Synchronizer | None:
        """Return the synchronizer that a model needs; ``None`` if every push is applied as it comes."""
        parts = (self.leases, self.commit, self.apply_thread, self.metrics)
        if isinstance(model, GroupedShard):
            return WagmaSynchronizer(model, *parts, self.memory.has_room)
        if isinstance(model, RoundShard):
            return RoundSynchronizer(model, *parts, model.expected_workers(self.leases.lease_seconds))
        return None

    def restart(self, state: ShardState) -> None:
        """Begin with a recovered state, whose workers get a new lease each; before anything is served."""
        self.serve(state)
        for worker in state.workers:
            self.leases.grant(worker).last_step = state.pushes.find(worker.identity).step

    def copy_model(self) -> ModelCopy:
        """Copy the shard's values at a version that is durable; the copy must be closed."""
        copy = self.apply_thread.run(self.copy_now)
        try:
            self.durability.records.wait()
        except BaseException:
            copy.close()
            raise
        return copy

    def copy_now(self) -> ModelCopy:
        """Copy the shard's values at the current version; on the apply thread. The copy must be closed."""
        return ModelCopy(self.require_model(None), self.buffers_now())

    def buffers_now(self) -> StateDict:
        """Return the buffers by name; none if the shard has none."""
        buffers = self.state.buffers
        return buffers.state() if buffers else {}

    def buffer_contributions(self) -> int:
        """Count the changes of the buffers since the shard has had its state."""
        buffers = self.state.buffers
        return buffers.contributions if buffers else 0

    def wait_until_durable(self) -> None:
        """Wait until every version so far is durable; raises :class:`Rejected` (``NOT_DURABLE``)."""
        self.durability.records.wait()

    def has_room_for_cuts(self, nbytes: int) -> bool:
        """Tell whether what is kept for answers, of which cuts have a part, has room for so many bytes more."""
        return not self.memory.exceeds(nbytes, self.memory.kept())

    def _kept(self) -> Kept:
        kept = Kept() if (model := self.model) is None else model.kept()
        own = None if model is None else model.copies  # a relay's next model has those of the one before
        others = [copies for each in self._replaced if (copies := each()) is not None and copies is not own]
        held_bytes = sum(copies.held_bytes for copies in others) + self.cuts.nbytes
        return kept._replace(copies=kept.copies + held_bytes) if held_bytes else kept

    def _sum_bytes(self) -> int:
        return 0 if (model := self.model) is None else model.sum_bytes

    def _forget_replies(self) -> None:
        if (model := self.model) is not None:
            model.forget_replies()
        self.cuts.forget_if_idle()

    def close(self) -> None:
        """Finish what is committed and stop the threads; a state that a failed change has left is not kept."""
        self.stopping.set()
        if self.lease_ends is not None:
            self.lease_ends.join()  # or it would write behind the last snapshot
        self.cuts.close()
        self.durability.stop()
        self.apply_thread.close()
        if self.apply_thread.failed:
            self.durability.abandon()
        else:
            self.durability.close()
        self.final_model.wait()
