"""Brings the shards of a relay to the cuts of the source, one cut after another.

Shard 0 asks the source for its newest cut, and tells the other shards. Each shard fetches its own part from its
counterpart, as a reader does, checks it by its digest, writes it down as a record, and serves it. Readers get the cut
once every shard has it; until then they have the one before. So a relay has the versions, generations and digests of
its source, and a reader may go from one to the other.
"""

import logging
import math
import socket
import threading
from collections.abc import Callable

import torch

from pscore.model.buffers import pack, unpack
from pscore.model.digest import ModelDigest
from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice, merge
from pscore.reader.cut import Cut, ShardVersion
from pscore.reader.transfer import CutTransfer, FetchedShard, digest_of_buffers
from pscore.wire.dense import cut as cut_span
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.layouts import unpack_layout
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.data_leases.dataset import Datasets
from psservice.feed.relayed_shard import Place, RelayedShard
from psservice.model.buffers import BufferAverage
from psservice.model.copies import values_at
from psservice.model.parameters import ModelShard, on_device
from psservice.model.training_mode import TrainingMode
from psservice.relay.source import WAIT_SECONDS, CutSource, Source, SourceError, question
from psservice.shard import model_install
from psservice.shard.following import RUN_STATES
from psservice.shard.shard import Shard
from psservice.state.records import messages_of
from psservice.state.run import RunState
from psservice.state.state import ShardState
from psservice.state.v1 import journal_pb2 as rec

log = logging.getLogger(__name__)

METHOD, SETTINGS = "relay", {"update": "relay"}
_TYPES = {"run": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 10.0
_COMPLAINT_SECONDS = 60.0
_READABLE_SECONDS = 10.0  # for readers' cut to be made, if there are readers
_POLL_SECONDS = 0.02
_BLOCK = 1 << 20


class Relay:
    """One shard of a relay; on shard 0 :meth:`start` starts the thread that asks the source."""

    def __init__(self, shard: Shard, source: CutSource | None = None) -> None:
        self._shard, self._settings = shard, shard.settings
        self._index = shard.settings.shard_index
        self._dtype = _TYPES[shard.settings.relay_type]
        self._source: CutSource = source or Source(shard.settings)
        self._going = threading.Lock()
        self._layout: ModelLayout | None = None  # of the source's model
        self._layout_is_of: tuple[str, int] | None = None  # run and generation
        self._transfer: CutTransfer | None = None
        self._digest: tuple[ModelShard, int, ModelDigest] | None = None  # of the model at this version
        self._is_doubtful = False  # whether a difference from what is here has led to another digest than the cut's
        self._closing = threading.Event()
        self._lost_at: float | None = None  # when the source was lost
        self._complained_at = -math.inf
        self._thread: threading.Thread | None = None
        shard.go_to = self.go_to
        if shard.is_coordinator:
            shard.cuts.may_begin = self.is_together

    def start(self) -> None:
        """Begin to ask the source."""
        if self._shard.is_coordinator:
            self._thread = threading.Thread(target=self._lead, name="relay", daemon=True)
            self._thread.start()

    @property
    def lost_seconds(self) -> float:
        """For how long the source has not been followed; 0 while it is."""
        lost_at = self._lost_at
        return 0.0 if lost_at is None else self._shard.environment.monotonic() - lost_at

    def close(self) -> None:
        """Break off the calls that are under way, and end the thread."""
        self._closing.set()
        self._source.close()
        if self._thread is not None:
            self._thread.join()

    # Shard 0

    def _lead(self) -> None:
        pause, known = _SHORTEST_PAUSE_SECONDS, None
        while not self._closing.is_set():
            try:
                known = self._follow(known)
                pause = _SHORTEST_PAUSE_SECONDS
                self._recovered()
                continue
            except (SourceError, Rejected) as error:
                self._complain(str(error))
            except Exception as error:  # whatever it was, the thread lives on and asks again
                self._complain(repr(error))
                log.exception("the source cannot be followed", exc_info=error)
            known = None
            self._closing.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _follow(self, known: Cut | None) -> Cut:
        """Wait for a newer cut than the known one, and have all shards go there; return it."""
        shard = self._shard
        state = RUN_STATES[shard.run.state] if known is not None else pb.RUN_STATE_UNSPECIFIED
        name = f"relay {socket.gethostname()} {self._settings.listen}"
        layout = self._layout
        fingerprint = layout.fingerprint if layout is not None else b""
        asked = question(known, fingerprint, state, self._dtype, name, WAIT_SECONDS)
        answer = self._source.await_cut(asked)
        if answer.HasField("layout"):
            self._layout = unpack_layout(answer.layout)
        cut = Cut.from_message(answer.cut)
        self._require_shards(cut)
        if cut != known or shard.relayed is None:
            shard.relay_failures.clear()
            shard.relayed = cut
            shard.tell_shards()
            self._go_to(cut)
            self._await(lambda: self.is_together() or self.has_failed(), math.inf)
            if not self.is_together():
                raise SourceError("a shard of the relay has not got its part of a cut: see the shards' logs")
            self._await(lambda: not shard.cuts.is_asked or self.is_readable(cut), _READABLE_SECONDS)
        if answer.run_state == pb.RUN_STATE_FINISHED and not shard.run.is_finished:
            shard.apply_thread.run(lambda: shard.commit(rec.Finished()))
            shard.tell_shards()
        return cut

    def is_together(self) -> bool:
        """Tell whether every shard has its part of the cut of the source that shard 0 has."""
        model = self._shard.model
        if not isinstance(model, RelayedShard):
            return False
        parts = {0: (model.generation, model.version), **self._shard.relay_parts}
        return all(parts.get(index) == each for index, each in enumerate(model.cut.shards))

    def has_failed(self) -> bool:
        """Tell whether another shard has tried to get its part of the cut, and could not.

        It asks shard 0 again then. At first it may ask because it has not heard of the cut.
        """
        return max(self._shard.relay_failures.values(), default=0) > 1

    def is_readable(self, cut: Cut) -> bool:
        """Tell whether readers get a cut."""
        newest = self._shard.cuts.newest
        shards = None if newest is None else next(iter(newest.shards.values()))
        return shards is not None and [each[:2] for each in shards] == [each[:2] for each in cut.shards]

    def _await(self, condition: Callable[[], bool], seconds: float) -> None:
        end = self._shard.environment.monotonic() + seconds
        while not condition() and self._shard.environment.monotonic() < end and not self._closing.is_set():
            self._closing.wait(_POLL_SECONDS)

    def _complain(self, why: str) -> None:
        """Note that the source is lost; log it at first, and then once a minute."""
        if self._closing.is_set():
            return
        now = self._shard.environment.monotonic()
        self._lost_at = now if self._lost_at is None else self._lost_at
        if now - self._complained_at >= _COMPLAINT_SECONDS:
            self._complained_at = now
            log.warning(
                "the source cannot be followed: readers keep the version that is here",
                extra={"source": self._settings.relay_of, "error": why},
            )

    def _recovered(self) -> None:
        if self._lost_at is not None:
            self._lost_at, self._complained_at = None, -math.inf
            log.info("the source is followed", extra={"source": self._settings.relay_of})

    # Every shard

    def go_to(self, cut: Cut) -> None:
        """Bring this shard to its part of a cut; raises :class:`Rejected`."""
        try:
            self._go_to(cut)
        except SourceError as error:
            raise Rejected(ErrorCode.BUSY, f"the source cannot be read: {error}") from error

    def _go_to(self, cut: Cut) -> None:
        with self._going:
            self._require_shards(cut)
            if self._has(cut) and self._buffers_digest() == self._wanted_buffers(cut):
                self._note(cut)
                return
            layout = self._layout_of(cut)
            span = layout.shard_spans(self._settings.num_shards)[self._index]
            held = self._held(cut, layout)
            transfer = self._transfer_of(layout, span)
            fetched = self._source.read(transfer, cut, held, self._buffers() if held is not None else b"")
            transfer.end()
            self._take(cut, layout, span, fetched)

    def _require_shards(self, cut: Cut) -> None:
        if len(cut.shards) != self._settings.num_shards:
            raise Rejected(
                ErrorCode.SHARD_MISMATCH,
                f"the source has {len(cut.shards)} shards, this relay {self._settings.num_shards}: start the relay "
                "again, with another --data-dir",
            )

    def _has(self, cut: Cut) -> bool:
        """Tell whether this shard has its part of a cut."""
        model, part = self._shard.model, cut.shards[self._index]
        if model is None or (model.generation, model.version) != part[:2] or not self._is_of(cut.run_id):
            return False
        return self._digest_of(model).value == part.digest  # with WAGMA a version has other values at another time

    def _note(self, cut: Cut) -> None:
        """Write down of which cut this shard's version is: of a newer one, if other shards alone have moved."""
        model, part = self._shard.model, cut.shards[self._index]
        if isinstance(model, RelayedShard) and model.cut.shards != places_of(cut):
            self._commit(cut, part.version, None, b"")

    def _take(self, cut: Cut, layout: ModelLayout, span: Span, fetched: FetchedShard) -> None:
        """Check a fetched part, and make it this shard's version."""
        part, shard = cut.shards[self._index], self._shard
        wanted = self._wanted_buffers(cut)
        buffers = fetched.buffers or (self._buffers() if wanted else b"")
        if wanted and digest_of_buffers(buffers) != wanted:
            raise Rejected(ErrorCode.BAD_COMMIT, "the source has sent other buffers than those of the cut")
        update = merge(span, fetched.changes)
        digest = ModelDigest(layout)
        if fetched.base is None:
            if update is None or update.offsets is not None:
                raise Rejected(ErrorCode.BAD_COMMIT, "the source has not sent all of the model")
            for piece in _pieces(update):
                digest.add(piece)
        else:
            model = shard.model
            assert model is not None
            digest = ModelDigest(layout, self._digest_of(model).value)
            if update is not None:
                digest.remove(_read(model, update))
                digest.add(update)
        if digest.value != part.digest:
            self._digest, self._is_doubtful = None, True
            raise Rejected(ErrorCode.BAD_COMMIT, "what the source has sent has another digest than its cut")
        if fetched.base is None:
            self._install(cut, layout, span, update, buffers)
        else:
            self._commit(cut, fetched.base.version, update, fetched.buffers)
        assert shard.model is not None
        self._digest, self._is_doubtful = (shard.model, part.version, digest), False
        shard.metrics.version = part.version
        log.debug("version relayed", extra={"version": part.version, "bytes": fetched.received_bytes})

    def _commit(self, cut: Cut, before: int, update: SparseSlice | None, buffers: bytes) -> None:
        """Write down the difference from a version to that of a cut, and assign it."""
        part, shard = cut.shards[self._index], self._shard
        record = rec.Relayed(
            generation=part.generation, version=part.version, before=before, buffers=buffers, parts=_parts_of(cut)
        )
        body = shard.durability.records.body(messages_of(update, shard.span, self._settings.chunk_bytes))
        there = on_device(update, shard.device)
        shard.apply_thread.run(lambda: shard.commit(record, there, body))

    def _install(self, cut: Cut, layout: ModelLayout, span: Span, update: SparseSlice | None, buffers: bytes) -> None:
        """Put a whole model in the place of this shard's: the first one, or that of another generation or run."""
        shard, part = self._shard, cut.shards[self._index]
        assert update is not None

        def make() -> ShardState:
            mode = TrainingMode.of(SETTINGS)
            model = RelayedShard(
                layout,
                span,
                update.values.to(shard.device, copy=True),  # a message may own the memory
                generation=part.generation,
                version=part.version,
                settings=self._settings.shard,
                mode=mode,
                clock=shard.environment.monotonic,
                first_version=part.version,
            )
            model.relay(places_of(cut))
            average = BufferAverage(layout.buffers, unpack(buffers, layout.buffers)) if buffers else None
            state = shard.state.with_model(
                model, average, Datasets(), run_id=cut.run_id, run_state=RunState.TRAINING, samples=0
            )
            state.run.agree(METHOD, SETTINGS)
            return state

        with shard.join_lock:
            model_install.claim(shard)
        model_install.install(shard, make)

    def _layout_of(self, cut: Cut) -> ModelLayout:
        """Return the layout of the source's model, in the type in which this relay holds it."""
        of = cut.run_id, cut.shards[0].generation
        if self._layout is None or self._layout_is_of != of:
            known = b"" if self._layout is None else self._layout.fingerprint
            answer = self._source.await_cut(
                question(None, known, pb.RUN_STATE_UNSPECIFIED, self._dtype, "", WAIT_SECONDS)
            )
            if answer.HasField("layout"):
                self._layout = unpack_layout(answer.layout)
            self._layout_is_of = of
        assert self._layout is not None
        return self._layout if self._dtype is None else self._layout.viewed_in(self._dtype)

    def _held(self, cut: Cut, layout: ModelLayout) -> Cut | None:
        """Return the cut from which a difference leads to another one; ``None`` if all is to be fetched."""
        model, part = self._shard.model, cut.shards[self._index]
        if self._is_doubtful or model is None or not self._is_of(cut.run_id):
            return None
        if model.layout.fingerprint != layout.fingerprint:
            return None
        if model.version == part.version and not self._has(cut):  # the same version has other values by now
            return None
        mine = ShardVersion(model.generation, model.version, self._digest_of(model).value)
        return Cut(cut.run_id, tuple(mine for _ in cut.shards))

    def _transfer_of(self, layout: ModelLayout, span: Span) -> CutTransfer:
        """Return the transfer that goes on where the one before was broken off."""

        def read(entries: SparseSlice) -> SparseSlice | None:
            now = self._shard.model
            return None if now is None else _read(now, entries)

        if (
            self._transfer is None
            or self._transfer.layout.fingerprint != layout.fingerprint
            or self._transfer.span != span
        ):
            self._transfer = CutTransfer(self._index, layout, span, self._dtype, read)
        return self._transfer

    def _digest_of(self, model: ModelShard) -> ModelDigest:
        """Return the digest of this shard's values, which nobody else changes."""
        if self._digest is None or self._digest[:2] != (model, model.version):
            digest = ModelDigest(model.layout)
            for part in cut_span(model.span, _BLOCK):
                digest.add(_read(model, SparseSlice(part, None, torch.empty(0, dtype=torch.float32, device="cpu"))))
            self._digest = model, model.version, digest
        return self._digest[2]

    def _is_of(self, run_id: str) -> bool:
        return self._shard.run.run_id == run_id

    def _buffers(self) -> bytes:
        """Return the buffers, packed; empty if there are none."""
        buffers, model = self._shard.buffers_now(), self._shard.model
        return pack(buffers[spec.name] for spec in model.layout.buffers) if buffers and model is not None else b""

    def _buffers_digest(self) -> bytes:
        packed = self._buffers()
        return digest_of_buffers(packed) if packed else b""

    def _wanted_buffers(self, cut: Cut) -> bytes:
        """Return the digest of the buffers that this shard is to have: shard 0 has them all."""
        return cut.buffers_digest if self._index == 0 else b""


def places_of(cut: Cut) -> tuple[Place, ...]:
    """Return the places of a cut's shards."""
    return tuple(Place(each.generation, each.version) for each in cut.shards)


def _parts_of(cut: Cut) -> list[rec.RelayedPart]:
    return [rec.RelayedPart(generation=each.generation, version=each.version) for each in cut.shards]


def _read(model: ModelShard, entries: SparseSlice) -> SparseSlice:
    """Return a shard's values at the places of entries, on the host."""
    start = entries.span.start - model.span.start
    if entries.offsets is None:
        return SparseSlice(entries.span, None, model.theta[start : start + entries.span.length].cpu())
    offsets = (entries.offsets + start).to(model.theta.device)
    return SparseSlice(entries.span, entries.offsets, values_at(model.theta, offsets).cpu())


def _pieces(update: SparseSlice) -> list[SparseSlice]:
    """Cut a whole update into parts."""
    return [piece for part in cut_span(update.span, _BLOCK) if (piece := update.clip(part)) is not None]
