"""The engine: one shard's whole behaviour without gRPC.

It ties the rooms together: membership and run decide who may do what, the writer applies in order, the model shard
computes. Everything here may raise :class:`pscore.reasons.Refusal`; the servicer turns that into a status.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from google.protobuf.message import Message

from pscore.buffers import packed_bytes, unpack
from pscore.codecs.names import VALUE_CODECS
from pscore.frames import WireForm
from pscore.generation import epoch, next_generation
from pscore.layout import ModelLayout, Span
from pscore.reasons import Reason, Refusal
from pscore.segment import Segment, merge
from pscore.selectors import SELECTORS
from psservice import modelstart
from psservice.buffers import BufferAverage
from psservice.dataset import Datasets, Leased, Share, Wish
from psservice.finalmodel import FinalModel, ModelCopy
from psservice.groupkeeper import GroupKeeper
from psservice.history import History, on_device
from psservice.membership import Identity, Member, Membership, PushAnswer
from psservice.metrics import Metrics, Traffic
from psservice.persistence import Persistence
from psservice.roundkeeper import RoundKeeper
from psservice.rules.admission import Admission
from psservice.rules.regime import Regime
from psservice.rules.reply import reply_rule
from psservice.run import Run, RunState
from psservice.settings import ServerSettings
from psservice.shard.difference import DownSettings
from psservice.shard.grouped import make_shard
from psservice.shard.model import Correction, ModelShard
from psservice.shard.replies import Reply, TopKSettings, answer
from psservice.shard.writer import Writer
from psservice.uploadturn import UploadTurn

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JoinOutcome:
    """What a joining worker is told: ``state`` is ready, upload or wait; ``last_push`` is (incarnation, step).

    ``first_step`` is the lowest number that its next push should have.
    """

    state: str
    generation: int
    version: int
    last_push: tuple[str, int] | None
    first_step: int = 1


@dataclass(frozen=True, slots=True)
class Push:
    """A received push, not yet applied; segments in any order, disjoint, inside the shard's span."""

    identity: Identity
    step: int
    generation: int
    base_version: int
    samples: int
    segments: list[Segment]
    messages: Sequence[Message] = ()
    """The stream as it came, for the journal."""
    learning_rate: float = 0.0
    """That the values carry; 0 where it is not known."""
    finished: Mapping[str, Share] = field(default_factory=dict)
    """Samples that it finishes, by dataset."""


class Engine:
    """One shard of one run."""

    def __init__(
        self,
        settings: ServerSettings,
        device: torch.device,
        metrics: Metrics,
        on_health: Callable[[bool], None] = lambda healthy: None,
    ) -> None:
        """Start with what the data directory holds, else empty (or ready for ``--init``).

        Args:
            settings: the server's.
            device: where the parameters live.
            metrics: told what happens.
            on_health: told ``False`` while pushes cannot be made durable.

        Raises:
            StorageError: the data directory is in use, damaged, or of another run.
        """
        self.settings = settings
        self.device = device
        self.metrics = metrics
        self.traffic = Traffic()
        self.is_coordinator = settings.shard_index == 0
        coordinates = self.is_coordinator
        self.run = Run(
            settings.run_id,
            coordinator=coordinates,
            end_versions=settings.end_versions if coordinates else 0,
            end_samples=settings.end_samples if coordinates else 0,
        )
        self.membership = Membership(
            settings.lease_seconds,
            lambda: reply_rule(settings.down_mode, settings.exact_limit),
            on_expire=self._expired,
        )
        self.admission = Admission(
            settings.max_staleness, settings.ssp_bound if coordinates else 0, settings.max_update_norm
        )
        self.writer = Writer(settings.apply_queue_limit)
        self.model: ModelShard | None = None
        self.layout: ModelLayout | None = None
        self.buffers: BufferAverage | None = None
        self.datasets = Datasets()
        self.draining = False
        self._final_model = FinalModel(settings.final_model, settings.shard_index, settings.num_shards)
        self._topk = TopKSettings(
            DownSettings(settings.down_density, settings.down_dense_below, SELECTORS[settings.down_selector]),
            VALUE_CODECS[settings.down_value_type],
            settings.chunk_bytes,
        )
        self._start: modelstart.Start | None = None
        self._upload_turn = UploadTurn(self.membership.is_live)
        self._join_lock = threading.Lock()
        self._stop = threading.Event()
        self.regime = Regime()
        self._scaling = settings.scaling
        self.persistence = Persistence(settings, on_health)
        self._rounds = RoundKeeper(self.membership, self.persistence, self.writer, metrics, self._round_closed)
        self._groups = GroupKeeper(self.membership, self.persistence, self.writer, metrics)
        try:
            self.persistence.recover(self)
            if settings.init and self.model is None:
                self._start = modelstart.read(settings.init, settings.init_checkpoint)
        except BaseException:
            self.writer.close()
            self.persistence.abandon()
            raise
        self._end_again()
        self.persistence.start(self)
        threading.Thread(target=self._end_leases, name="lease-reaper", daemon=True).start()

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
    ) -> JoinOutcome:
        """Grant a lease and say whether the worker pulls, uploads or waits (docs/protocol.md, *Joining*)."""
        if layout.size < self.settings.num_shards:
            raise Refusal(
                Reason.BAD_REQUEST, f"a model of {layout.size} elements cannot be cut into {self.settings.num_shards}"
            )
        with self._join_lock:
            self._require_serving()
            regime = Regime.of(method_settings)
            others = any(member.identity != identity for member in self.membership.members())
            alone = self.model is None and not others and self._start is None
            if self.layout is not None and not alone:
                self._require_same_model(self.layout, layout)
            self.run.agree(method, method_settings, replace=alone or self._start is not None)
            self.regime = regime
            if self._start is not None:
                self._install_start(layout, self._start)
                self._start = None
            elif self.layout is None or alone:
                self.layout = layout
            known = self.membership.is_live(identity)
            member = self.membership.join(identity)
            if not known:
                try:
                    self.persistence.joined(identity, index_codecs)
                except Refusal:  # else the next attempt would find a lease that no restart knows of
                    self.membership.leave(identity)
                    raise
            member.index_codecs = index_codecs
            self.metrics.live_workers.set(len(self.membership))
            log.info("worker joined", extra={"worker": identity.worker_id, "incarnation": identity.incarnation})
            last_push = self.membership.last_push(identity.worker_id)
            if self.model is not None:
                return JoinOutcome("ready", self.model.generation, self.model.version, last_push, self.model.first_step)
            generation = self._upload_turn.ask(identity, generation_seen, has_replica) if self.is_coordinator else None
            return JoinOutcome("wait" if generation is None else "upload", generation or 0, 0, last_push)

    def leave(self, identity: Identity) -> None:
        """End a lease; unknown ones are ignored, so that leaving twice is harmless."""
        if self.membership.leave(identity):
            self.persistence.left(identity)
            with suppress(Refusal):
                self._rounds.look(lambda: self.model, self.regime.rounds)
            self.metrics.live_workers.set(len(self.membership))
            log.info("worker left", extra={"worker": identity.worker_id})

    @property
    def span(self) -> Span:
        """What this shard owns; raises :class:`Refusal` (``NOT_INITIALISED``) before the first join."""
        if self.layout is None:
            raise Refusal(Reason.NOT_INITIALISED, "no worker has joined yet, so the model is not known")
        return self.layout.shard_spans(self.settings.num_shards)[self.settings.shard_index]

    # The model's way in

    def check_upload(self, identity: Identity, generation: int) -> None:
        """Refuse an upload that would not be taken; called before its bytes are received, and again at the end."""
        self.membership.require(identity)
        if self.model is not None and epoch(generation) == epoch(self.model.generation):
            raise Refusal(Reason.ALREADY_UPLOADED, "another worker has uploaded the model meanwhile")
        if self.is_coordinator:
            self._upload_turn.require(identity, generation)
        if epoch(generation) <= (0 if self.model is None else epoch(self.model.generation)):
            raise Refusal(Reason.STALE_GENERATION, f"generation {generation} is older than what is here")

    def upload_buffer_bytes(self) -> int:
        """Bytes of buffers that an upload to this shard carries."""
        if not self.is_coordinator or self.settings.buffers == "none" or self.layout is None:
            return 0
        return packed_bytes(self.layout.buffers)

    def finish_upload(
        self, identity: Identity, generation: int, version: int, segments: list[Segment], buffers: bytes
    ) -> int:
        """Install an uploaded model (dense segments that cover the shard's span) and return its version."""
        flat = torch.cat([segment.values for segment in segments]) if segments else torch.empty(0)

        def install() -> int:
            with self._join_lock:
                self.check_upload(identity, generation)
                layout = self.layout
                assert layout is not None  # check_upload has found a member, who brought one
                specs = layout.buffers if self.upload_buffer_bytes() else ()
                self._install(layout, flat, unpack(buffers, specs), generation, version)
                return version

        return self.writer.run(install)

    # Training

    def check_push(self, identity: Identity, step: int) -> None:
        """Refuse at the header what need not be received: draining, no lease, a new push too far ahead of the others.

        The writer decides the rest, and the lead once more.
        """
        self._require_serving()
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
        body = self.persistence.written(push.messages)

        def apply() -> tuple[PushAnswer, bool]:
            member = self.membership.require(push.identity)
            record = self.membership.record(push.identity)
            if push.step == record.step and record.answer is not None:
                return record.answer, True
            if push.step < record.step:
                raise Refusal(Reason.STEP_OUT_OF_ORDER, f"step {push.step} comes after step {record.step} was applied")
            self.run.require_open()
            model = self.require_model(push.generation)
            if push.base_version > model.version:
                raise Refusal(
                    Reason.VERSION_IN_FUTURE, f"base version {push.base_version}, the server has {model.version}"
                )
            self._groups.admit(model, push.identity)
            staleness = model.version - push.base_version
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
            number = self.persistence.pushed(body, PushAnswer(model.version + 1, staleness, 0, factor))
            started = time.perf_counter_ns()
            try:
                correction = Correction(factor, push.base_version, push.learning_rate, push.samples > 0)
                version = model.take(push.identity.worker_id, update, correction, push.step)
            except BaseException:
                self.persistence.take_back(number)
                raise
            answer = PushAnswer(version, staleness, time.perf_counter_ns() - started, factor)
            self.membership.remember_push(push.identity, push.step, answer)
            self.datasets.put(datasets)
            member.last_step, member.staleness = push.step, staleness
            self.membership.tick(member)
            member.samples += push.samples
            self.metrics.observe_push(answer, model.version)
            over = self.run.count(model.version, push.samples)
            self._rounds.close_if_due(model, self.regime.rounds)
            self._groups.freeze_due(model)
            if over:
                self._end_run()
            return answer, False

        answer, repeated = self.writer.run(apply)
        self.persistence.wait()
        return answer, repeated

    def pull(
        self,
        identity: Identity,
        generation: int,
        *,
        base_version: int | None,
        acknowledged: int,
        replica_is_image: bool,
        link_bytes_per_second: float = 0.0,
    ) -> Reply:
        """Answer a pull, exactly or top-k."""
        member = self.membership.require(identity)
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
            form=form,
        )
        self.persistence.wait()
        member.reply_mode, member.reply_density = reply.mode, reply.density
        self.metrics.observe_pull(reply)
        return reply

    def _await_round(self, identity: Identity) -> None:
        self._rounds.look(lambda: self.model, self.regime.rounds)
        if self.model is not None and self.run.state is RunState.TRAINING:
            self._rounds.require_closed(self.model, identity.worker_id)

    def _round_closed(self, model: ModelShard) -> None:
        if self.run.is_over(model.version):
            self._end_run()

    def require_buffers(self, identity: Identity, generation: int) -> BufferAverage:
        """Return the buffers for an exchange; raises :class:`Refusal` where there are none here."""
        self.membership.require(identity)
        self.require_model(generation)
        if self.buffers is None:
            raise Refusal(Reason.BAD_REQUEST, "this shard keeps no buffers (shard 0 does, unless the policy is none)")
        return self.buffers

    def exchange_buffers(self, identity: Identity, generation: int, step: int, samples: int, data: bytes) -> bytes:
        """Average a worker's buffers in, once a step and not after the run's end, and return the average."""
        self.require_buffers(identity, generation)
        record = self.membership.record(identity)
        live = len(self.membership)
        with self.persistence.averaging:
            buffers = self.require_buffers(identity, generation)  # a rollback may have put others there meanwhile
            if samples and step > record.buffer_step and self.run.state is RunState.TRAINING:
                buffers.check(data)
                self.persistence.averaged(identity, step, samples, data, live)
                buffers.contribute(data, samples, live)
                record.buffer_step = step
        self.persistence.wait()
        return buffers.packed()

    def lease_samples(self, identity: Identity, wish: Wish) -> Leased:
        """Hand a worker samples to train; on the writer thread, so that the order with pushes is that of the journal.

        Raises:
            Refusal: ``SETTINGS_MISMATCH`` where the worker has another dataset, ``BAD_REQUEST``, ``NOT_DURABLE``.
        """
        self._require_serving()
        if not self.is_coordinator:
            raise Refusal(Reason.BAD_REQUEST, "shard 0 hands out samples; the others know of none")

        def lease() -> Leased:
            member = self.membership.require(identity)
            self.require_model(None)
            live = {member.identity for member in self.membership.members()}
            over = self.run.state is RunState.FINISHED
            leased = self.datasets.lease(identity, replace(wish, samples=0) if over else wish, live)
            if leased.changed:
                self.persistence.leased(identity, wish, leased)
                self.datasets.put({wish.dataset: leased.after})
            member.has_no_samples = wish.samples > 0 and not leased.after.held_by(identity)
            return leased

        leased = self.writer.run(lease)
        self.persistence.wait()
        return leased

    def copy_model(self) -> ModelCopy:
        """Copy the shard's values at the current version."""
        model = self.require_model(None)
        version, values = self.writer.run(lambda: (model.version, model.current()))
        self.persistence.wait()
        return ModelCopy(model, version, values, self.buffers.state() if self.buffers else {})

    def roll_back(self, version: int | None, checkpoint: str) -> ModelShard:
        """Go back to a version or a checkpoint, as a new generation, which workers pull by themselves.

        What is remembered of pushes stays, so that the repeat of one that was rolled back is not applied anew.

        Raises:
            Refusal: ``BAD_REQUEST``, where it is not kept; ``NOT_DURABLE``.
        """
        self.require_model(None)
        history = self.persistence.look_back(self, version, checkpoint)

        def install() -> ModelShard:
            with self._join_lock:
                old = self.require_model(None)
                before = self.model, self.buffers, self.run.state, self.run.samples
                datasets, self.datasets = self.datasets, history.datasets
                history.model.generation = next_generation(old.generation)
                self.model, self.buffers = history.model, history.buffers
                self.run.state, self.run.samples = history.run_state, history.samples
                try:
                    self.persistence.take_inside(self)
                except BaseException:
                    self.model, self.buffers, self.run.state, self.run.samples = before
                    self.datasets = datasets
                    raise
                self.membership.reset_downlinks()
                self.metrics.version.set(history.model.version)
                log.warning("rolled back", extra={"from": old.version, "to": history.model.version})
                return history.model

        return self.writer.run(install)

    # The end

    def finish(self) -> str:
        """End the run, write the final model if asked to, and return its path."""
        self.require_model(None)
        self.writer.run(self._end_run)
        self.persistence.wait()
        return self._final_model.wait()

    def close(self) -> None:
        """Finish what is committed and stop the threads."""
        self._stop.set()
        self.persistence.stop()
        self.writer.close()
        self.persistence.close(self)
        self._final_model.wait()

    def require_model(self, generation: int | None) -> ModelShard:
        """Return the model; raises :class:`Refusal` where there is none, or one of another generation."""
        if self.model is None:
            raise Refusal(Reason.NOT_INITIALISED, "no worker has uploaded a model yet")
        if generation is not None and generation != self.model.generation:
            raise Refusal(
                Reason.STALE_GENERATION, f"the caller has generation {generation}, the server {self.model.generation}"
            )
        return self.model

    # Inner parts

    def _require_serving(self) -> None:
        if self.draining:
            raise Refusal(Reason.DRAINING, "the server is stopping")

    def _require_in_step(self, member: Member) -> None:
        if self.admission.ssp_bound:
            self.admission.require_in_step(self.membership.pace(member))

    @staticmethod
    def _require_same_model(ours: ModelLayout, theirs: ModelLayout) -> None:
        if ours.fingerprint == theirs.fingerprint:
            return
        name, how = ours.first_difference(theirs) or ("", "the layouts differ")
        raise Refusal(Reason.FINGERPRINT_MISMATCH, how, tensor=name)

    def adopt(self, history: History) -> None:
        """Become what a history has been replayed to; before anything is served, or on the writer thread."""
        manifest = history.manifest
        self.layout, self.model, self.buffers = history.layout, history.model, history.buffers
        self.datasets = history.datasets
        self.run.restore(history.run_id, history.run_state, manifest.method, manifest.method_settings, history.samples)
        self.regime = Regime.of(manifest.method_settings)
        live = [live.identity for live in history.workers.values()]
        for member in self.membership.restore(history.pushes, history.last_pushes, live):
            live_then = history.workers[member.identity.worker_id]
            member.index_codecs, member.clock = live_then.index_codecs, live_then.clock
            member.last_step = self.membership.record(member.identity).step
        self._start = None
        self.metrics.version.set(history.model.version)
        self.metrics.live_workers.set(len(self.membership))

    def _install_start(self, layout: ModelLayout, start: modelstart.Start) -> None:
        flat, buffers = modelstart.fit(layout, start.tensors, with_buffers=self.settings.buffers != "none")
        self.layout = layout
        self._install(
            layout,
            flat[self.span.start : self.span.end],
            buffers if self.is_coordinator else [],
            next_generation(0),
            start.version,
            start,
        )

    def _install(
        self,
        layout: ModelLayout,
        flat: torch.Tensor,
        buffers: list[torch.Tensor],
        generation: int,
        version: int,
        start: modelstart.Start | None = None,
    ) -> None:
        before = self.model, self.buffers, self.run.state
        self.model = make_shard(
            layout,
            self.span,
            flat.to(self.device, torch.float32).clone(),
            generation=generation,
            version=version,
            settings=self.settings.shard,
            regime=self.regime,
        )
        self.buffers = BufferAverage(layout.buffers, buffers) if buffers else None
        if start is not None:
            self._go_on_from(start, self.model)
        self.run.started()
        try:
            self.persistence.take_inside(self)
        except BaseException:
            self.model, self.buffers, self.run.state = before
            raise
        self.membership.reset_downlinks()
        self._upload_turn.end()
        self.metrics.version.set(version)
        log.info("model installed", extra={"generation": generation, "version": version, "elements": self.span.length})

    def _go_on_from(self, start: modelstart.Start, model: ModelShard) -> None:
        """Take over how far another run had come, whatever its number of shards was."""
        if self.is_coordinator:
            self.run.samples, self.datasets = start.samples, start.datasets
        if self.buffers is not None:
            self.buffers.weight = start.buffer_weight
        if any(memory.pieces for memory in start.memories):
            same_model = start.layout is not None and start.layout.fingerprint == model.layout.fingerprint
            if not (same_model and model.inherit(start.memories)):
                log.warning("the update rule begins anew: that of the --init run, or its order of tensors, is another")

    def _end_run(self) -> None:
        """End the run; on the writer thread, so that the final model is the one at the last version."""
        model = self.require_model(None)
        if not self.run.is_finished:
            self._rounds.close(model)  # may be what ends the run
        if self.run.is_finished:
            return
        self.persistence.finished(self.run.run_id)
        self.run.state = RunState.FINISHED
        model.finish()
        log.info("run finished", extra={"version": model.version, "samples": self.run.samples})
        self._write_final_model(model)

    def _write_final_model(self, model: ModelShard) -> None:
        self._final_model.begin(
            lambda: ModelCopy(model, model.version, model.current(), self.buffers.state() if self.buffers else {}),
            self.run.run_id,
        )

    def _end_again(self) -> None:
        """After a restart, do what the end of the run was to do: the server may have died in the middle of it."""
        if self.model is None:
            return
        if self.run.state is RunState.TRAINING and self.run.is_over(self.model.version):
            self.writer.run(self._end_run)
        elif self.run.state is RunState.FINISHED and not self._final_model.is_there(
            self.run.run_id, self.model.version
        ):
            self._write_final_model(self.model)

    def _expired(self, member: Member) -> None:
        self.persistence.left(member.identity)
        self.metrics.leases_expired.inc()
        log.warning(
            "lease ended: worker is taken for dead",
            extra={"worker": member.identity.worker_id, "last_step": member.last_step},
        )

    def _end_leases(self) -> None:
        while not self._stop.wait(min(1.0, self.settings.lease_seconds / 4)):
            self.metrics.live_workers.set(len(self.membership))
            with suppress(Refusal):  # busy, or not durable: the next look finds it due still
                self._rounds.look(lambda: self.model, self.regime.rounds)
