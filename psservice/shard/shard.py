"""The engine: one shard's whole behaviour without gRPC.

It ties the rooms together: membership and run decide who may do what, the writer applies in order, the model shard
computes. Everything here may raise :class:`pscore.wire.errors.Rejected`; the servicer turns that into a status.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch

from pscore.model.layout import ModelLayout
from pscore.model.segment import merge
from pscore.select import SELECTORS
from pscore.wire.codecs.names import VALUE_CODECS
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.frames import WireForm
from pscore.wire.generation import epoch
from pscore.wire.messages import first_difference, layout_to_message
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.cluster.leases import Identity, Member, PushAnswer
from psservice.cluster.run import RunState, added
from psservice.model.buffers import BufferAverage
from psservice.model.parameters import ModelShard, PushContext
from psservice.model.reply_session import Reply, Reserve, TopKSettings, answer
from psservice.model.topk import DownSettings
from psservice.model.training_mode import TrainingMode
from psservice.observability.metrics import Metrics
from psservice.policy.admission import Admission
from psservice.recovery.final_model import ModelCopy
from psservice.recovery.replayer import on_device
from psservice.sampling.dataset import Leased, Wish
from psservice.settings import ServerSettings
from psservice.shard import buffers_and_samples, rollback
from psservice.shard.model_entry import ModelEntry
from psservice.shard.round_coordinator import RoundCoordinator
from psservice.shard.run_end import RunEnd
from psservice.shard.state import ShardState
from psservice.shard.types import JoinOutcome, Loaded, Push
from psservice.shard.upload import Upload
from psservice.shard.wagma_coordinator import WagmaCoordinator
from psservice.storage.environment import MACHINE, Environment

log = logging.getLogger(__name__)


class Engine(ShardState):
    """One shard of one run, and what may be asked of it."""

    def __init__(
        self,
        settings: ServerSettings,
        device: torch.device,
        metrics: Metrics,
        on_health: Callable[[bool], None] = lambda healthy: None,
        on_failure: Callable[[], None] = lambda: None,
        environment: Environment = MACHINE,
    ) -> None:
        """Start with what the data directory holds, else empty (or ready for ``--init``).

        Args:
            settings: the server's.
            device: where the parameters live.
            metrics: told what happens.
            on_health: told ``False`` while pushes cannot be made durable.
            on_failure: called once, when a change has failed half-way and the process is to stop.
            environment: clocks, threads and files.

        Raises:
            StorageError: the data directory is in use, damaged, or of another run.
        """
        super().__init__(settings, device, metrics, on_health, on_failure, environment)
        self.admission = Admission(
            settings.max_staleness, settings.ssp_bound if self.is_coordinator else 0, settings.max_update_norm
        )
        self._topk = TopKSettings(
            DownSettings(settings.down_density, settings.down_dense_below, SELECTORS[settings.down_selector]),
            VALUE_CODECS[settings.down_value_type],
            settings.chunk_bytes,
            self.images,
        )
        self._stop = threading.Event()
        self._scaling = settings.scaling
        self._end = RunEnd(self, lambda model: self._rounds.close(model))
        self._rounds = RoundCoordinator(
            self.membership, self.persistence.events, self.writer, metrics, self._end.round_closed
        )
        self._groups = WagmaCoordinator(self.membership, self.persistence.events, self.writer, metrics)
        self._entry = ModelEntry(self)
        try:
            self.persistence.recover(self)
            self._entry.read_start()
        except BaseException:
            self.writer.close()
            self.persistence.abandon()
            raise
        self._end.come_again()
        self.persistence.start(self)
        environment.start(self._end_leases_in_time, "lease-reaper")

    # Membership

    def join(
        self,
        identity: Identity,
        layout: ModelLayout,
        method: str,
        method_settings: Mapping[str, str],
        *,
        generation_seen: int,
        has_replica: bool,
        index_codecs: frozenset[int] = frozenset(),
        loaded: Loaded | None = None,
    ) -> JoinOutcome:
        """Grant a lease and say whether the worker pulls, uploads or waits (docs/protocol.md, *Joining*)."""
        if layout.size < self.settings.num_shards:
            raise Rejected(
                ErrorCode.BAD_REQUEST,
                f"a model of {layout.size} elements cannot be cut into {self.settings.num_shards}",
            )
        with self.join_lock:
            self.doorway.require_open()
            fitted = self._entry.fit_start(layout)
            starts = fitted is not None
            alone = not starts and self.is_alone(identity)
            # Read before they become the run's; where they must be the run's, that has been done.
            regime = TrainingMode.of(method_settings) if alone or starts or not self.run.method else self.regime
            if self.layout is not None and not alone:
                self._require_same_model(self.layout, layout)
            self.run.agree(method, method_settings, replace=alone or starts)
            self.regime = regime
            if alone or (self.layout is None and not starts):
                self.layout = layout
            known = self.membership.is_live(identity)
            member = self.membership.join(identity)
            if not known:
                self.membership.expire()
                try:
                    self.persistence.events.joined(identity, index_codecs)
                except Rejected:  # else the next attempt would find a lease that no restart knows of
                    self.membership.leave(identity)
                    raise
            member.index_codecs = index_codecs
            self.metrics.joins.inc(not known)
            self.metrics.live_workers.set(len(self.membership))
            if not known:
                log.info("worker joined", extra={"worker": identity.worker_id, "incarnation": identity.incarnation})
            if fitted is None:
                return self._outcome(identity, generation_seen, has_replica, loaded)
            self._entry.claim_start(fitted)
        self._entry.install_start(fitted)
        with self.join_lock:
            return self._outcome(identity, generation_seen, has_replica, loaded)

    def _outcome(
        self, identity: Identity, generation_seen: int, has_replica: bool, loaded: Loaded | None
    ) -> JoinOutcome:
        """Say what a worker that has joined does next; the join lock is held."""
        last_push, model = self.membership.last_push(identity.worker_id), self.model
        if self.installing:
            return JoinOutcome("wait", 0, 0, last_push)
        takes = loaded is not None and self.is_coordinator and self._entry.takes(loaded)
        if model is not None and self.is_coordinator and has_replica:
            # Another shard has a part of an upload that did not come this far: a replica of this model mends that.
            takes |= epoch(generation_seen) > epoch(model.generation)
        if model is not None and not takes:
            refused = loaded is not None and not self._entry.began_as(loaded)
            return JoinOutcome("ready", model.generation, model.version, last_push, model.first_step, refused)
        if model is not None:
            generation_seen = max(generation_seen, model.generation)
        generation = self._entry.turn.ask(identity, generation_seen, has_replica) if self.is_coordinator else None
        return JoinOutcome("wait" if generation is None else "upload", generation or 0, 0, last_push)

    def upload_progress(self) -> pb.ModelProgress | None:
        """Return how far the model has come that a worker uploads; ``None`` where nobody is at it.

        All of it is there while it is installed, which takes as long as its first snapshot does.
        """
        return self._entry.turn.progress() or (pb.ModelProgress(share=1.0) if self.installing else None)

    def note_uploaded(self, identity: Identity, share: float) -> None:
        """Note how much of the whole model a worker has sent, 0 to 1."""
        self._entry.turn.note(identity, share)

    def leave(self, identity: Identity) -> None:
        """End a lease; unknown ones are ignored, so that leaving twice is harmless."""
        with self.join_lock:
            left = self.membership.leave(identity)
            if left:
                self.persistence.events.left(identity)
        self._entry.forget_upload(identity)
        if left:
            with suppress(Rejected):
                self._rounds.look(lambda: self.model, self.regime.rounds)
            self.metrics.leaves.inc()
            self.metrics.live_workers.set(len(self.membership))
            log.info("worker left", extra={"worker": identity.worker_id})

    def evict(self, worker_id: str, ban_seconds: float) -> Member | None:
        """End a lease from outside, and keep the worker out for a time; return who held it.

        A push of it that has not reached the writer yet is refused there. What it holds (image, samples, a place in a
        round) is free as after the end of a lease; the record of its pushes stays, so that a repeat is recognised.

        Raises:
            Refusal: ``NO_SUCH_WORKER``.
        """
        with self.join_lock:  # else the journal might have the worker's next lease before the end of this one
            member = self.membership.evict(worker_id, ban_seconds)
            if member is not None:
                self.persistence.events.left(member.identity)
        with suppress(Rejected):
            self._rounds.look(lambda: self.model, self.regime.rounds)
        self.metrics.live_workers.set(len(self.membership))
        log.warning("worker evicted", extra={"worker": worker_id, "ban_seconds": ban_seconds})
        return member

    # The model's way in

    def open_upload(self, identity: Identity, generation: int, buffer_bytes: int) -> Upload:
        """Return the upload that a call goes on with; refuse one that would not be taken, before it is received."""
        self.doorway.require_open()
        return self._entry.open_upload(identity, generation, buffer_bytes)

    @property
    def upload_bytes(self) -> int:
        """What an unfinished upload occupies."""
        return self._entry.upload_bytes

    def finish_upload(self, upload: Upload, version: int, *, run_id: str = "", digest: bytes = b"") -> int:
        """Install an uploaded model that is whole, and return its version."""
        return self._entry.finish_upload(upload, version, run_id=run_id, digest=digest)

    # Training

    def check_push(self, identity: Identity, step: int) -> None:
        """Refuse at the header what need not be received: draining, no lease, a new push too far ahead of the others.

        The writer decides the rest, and the lead once more.
        """
        self.doorway.require_open()
        member = self.membership.require(identity)
        if step > self.membership.record(identity).step and self.run.state is RunState.TRAINING:
            self._require_in_step(member)
            self._groups.require_turn(self.model, identity)

    def commit(self, push: Push) -> tuple[PushAnswer, bool]:
        """Apply a push once; return the answer and whether this identity had been answered before."""
        span = self.span
        ordered = sorted(push.segments, key=lambda segment: segment.span.start)
        merged = merge(span, ordered)
        norm = self.admission.norm(merged)
        update = on_device(merged, self.device)
        body = self.persistence.events.written(push.messages)

        def apply() -> tuple[PushAnswer, bool]:
            member = self.membership.require(push.identity)
            record = self.membership.record(push.identity)
            if push.step == record.step and record.answer is not None:
                return record.answer, True
            if push.step < record.step:
                raise Rejected(
                    ErrorCode.STEP_OUT_OF_ORDER, f"step {push.step} comes after step {record.step} was applied"
                )
            self.run.require_open()
            model = self.require_model(push.generation)
            if push.base_version > model.version:
                raise Rejected(
                    ErrorCode.VERSION_IN_FUTURE, f"base version {push.base_version}, the server has {model.version}"
                )
            self._groups.admit(model, push.identity)
            self._groups.require_near(model, push.step)
            own = record.own
            staleness = model.version - push.base_version - own.since(push.generation, push.base_version)
            in_rounds = model.round is not None and push.samples > 0  # a flush is the last chance of what is in it
            self.admission.require_fresh(staleness, in_rounds=in_rounds)
            self._require_in_step(member)
            self.admission.require_small(norm)
            factor = (
                self._scaling.factor(staleness, member.interval_seconds, self.membership.intervals())
                if self._scaling.is_on and model.is_asynchronous
                else 1.0
            )
            datasets = self.datasets.finish(push.identity, push.finished)
            self.persistence.events.pushed(body, PushAnswer(model.version + 1, staleness, 0, factor))
            started = time.perf_counter_ns()
            with self.writer.all_or_stop():
                correction = PushContext(
                    factor, push.base_version, push.learning_rate, push.samples, tuple(push.group_rates)
                )
                version = model.take(push.identity.worker_id, update, correction, push.step)  # refused: by a replay too
                if not self.run.run_id:
                    self.run.follow(push.run_id)
                answer = PushAnswer(version, staleness, time.perf_counter_ns() - started, factor)
                if model.round is None:
                    own = own.noted(push.generation, push.base_version, version)
                self.membership.remember_push(push.identity, push.step, answer, own)
                self.datasets.put(datasets)
            member.last_step, member.staleness = push.step, staleness
            self.membership.tick(member)
            member.samples = added(member.samples, push.samples)
            self.metrics.observe_push(answer, model.version)
            over = self.run.count(model.version, push.samples)
            self._rounds.close_if_due(model, self.regime.rounds)
            self._groups.freeze_due(model)
            if over:
                self._end.come()
            return answer, False

        answer, repeated = self.writer.run(apply)
        self.persistence.events.wait()
        return answer, repeated

    def pull(
        self,
        identity: Identity,
        generation: int,
        *,
        base_version: int | None,
        acknowledged: int,
        replica_is_image: bool,
        base_end: int = 0,
        link_bytes_per_second: float = 0.0,
        reserve: Reserve = lambda nbytes: None,
    ) -> Reply:
        """Answer a pull, exactly or top-k; ``reserve`` charges what the answer occupies, before it is made."""
        member = self.membership.require(identity)
        if base_end and not self.span.start < base_end <= self.span.end:
            raise Rejected(ErrorCode.BAD_REQUEST, f"base_end is {base_end}; it must be an index that the shard owns")
        self._await_round(identity)
        form = WireForm(allowed=member.index_codecs, link_bytes_per_second=link_bytes_per_second)
        model, base_version = self._groups.seen_by(self.require_model(generation), member, base_version, acknowledged)
        reply = answer(
            model,
            self.writer,
            member.downlink,
            self._topk,
            base_version=base_version,
            acknowledged=acknowledged,
            replica_is_image=replica_is_image,
            base_end=base_end,
            form=form,
            reserve=reserve,
        )
        self.writer.require_whole()  # a top-k reply is read beside the writer
        self.persistence.events.wait()
        member.reply_mode, member.reply_density = reply.mode, reply.density
        self.metrics.observe_pull(reply.mode.value, reply.density)
        return reply

    def _await_round(self, identity: Identity) -> None:
        self._rounds.look(lambda: self.model, self.regime.rounds)
        if self.model is not None and self.run.state is RunState.TRAINING:
            self._rounds.require_closed(self.model, identity.worker_id)

    def require_buffers(self, identity: Identity, generation: int) -> BufferAverage:
        """Return the buffers for an exchange; raises :class:`Rejected` where there are none here."""
        self.doorway.require_open()
        return buffers_and_samples.require_buffers(self, identity, generation)

    def exchange_buffers(self, identity: Identity, generation: int, step: int, samples: int, data: bytes) -> bytes:
        """Average a worker's buffers in, once a step and not after the run's end, and return the average."""
        return buffers_and_samples.exchange_buffers(self, identity, generation, step, samples, data)

    def lease_samples(self, identity: Identity, wish: Wish) -> Leased:
        """Hand a worker samples to train; raises :class:`Rejected`."""
        return buffers_and_samples.lease_samples(self, identity, wish)

    def copy_model(self) -> ModelCopy:
        """Copy the shard's values at the current version."""
        model = self.require_model(None)
        version, values = self.writer.run(lambda: (model.version, model.current()))
        self.persistence.events.wait()
        return ModelCopy(model, version, values, self.buffers.state() if self.buffers else {})

    def roll_back(self, version: int | None, checkpoint: str) -> ModelShard:
        """Go back to a version or a checkpoint, as a new generation, which workers pull by themselves."""
        return rollback.roll_back(self, version, checkpoint)

    # The end

    def finish(self) -> str:
        """End the run, write the final model if asked to, and return its path."""
        return self._end.finish()

    def close(self) -> None:
        """Finish what is committed and stop the threads; nothing is kept of a state that a failed change has left."""
        self._stop.set()
        self.persistence.stop()
        self.writer.close()
        if self.writer.failed:
            self.persistence.abandon()
        else:
            self.persistence.close(self)
        self._end.wait()

    # Inner parts

    def _require_in_step(self, member: Member) -> None:
        if self.admission.ssp_bound:
            self.admission.require_in_step(self.membership.pace(member))

    @staticmethod
    def _require_same_model(ours: ModelLayout, theirs: ModelLayout) -> None:
        if ours.fingerprint == theirs.fingerprint:
            return
        name, how = first_difference(layout_to_message(ours), layout_to_message(theirs)) or ("", "the layouts differ")
        raise Rejected(ErrorCode.FINGERPRINT_MISMATCH, how, tensor=name)

    def _end_leases_in_time(self) -> None:
        while not self._stop.wait(min(1.0, self.settings.lease_seconds / 8)):
            self.end_leases()

    def end_leases(self) -> None:
        """End the leases whose time is over; the thread of leases calls this often."""
        with self.join_lock:
            self.membership.expire()
        self._entry.forget_upload()
        self.metrics.live_workers.set(len(self.membership))
        with suppress(Rejected):  # busy, or not durable: the next look finds it due still
            self._rounds.look(lambda: self.model, self.regime.rounds)
