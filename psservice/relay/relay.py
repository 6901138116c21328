"""Brings the shards of a relay to the cuts of the source, one cut after another.

Shard 0 asks the source for its newest cut, and tells the other shards. Each shard fetches its own part from its
counterpart, as a reader does, checks it by its digest, and stages it by a record. Once every shard has done so, shard 0
publishes the cut, and the others follow, as those of a feed do. So a relay has the versions, generations and digests of
its source, a reader may go from one to the other, and whenever the relay stops, its shards have one cut in common.
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
from psservice.feed.relayed_shard import RelayedShard
from psservice.model.buffers import BufferAverage
from psservice.model.copies import values_at
from psservice.model.parameters import ModelShard, on_device
from psservice.model.training_mode import TrainingMode
from psservice.relay.source import FIRST_WAIT_SECONDS, WAIT_SECONDS, CutSource, Source, SourceError, question
from psservice.shard import model_install
from psservice.shard.following import RUN_STATES
from psservice.shard.publication import publish_relayed
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
_OTHERS_SECONDS = 5.0  # after a start, for the other shards to tell what they have
_POLL_SECONDS, _LOOK_SECONDS = 0.02, 1.0
_BLOCK = 1 << 20


class Relay:
    """One shard of a relay; :meth:`start` starts the thread that fetches, on shard 0 also the one that publishes."""

    def __init__(self, shard: Shard, source: CutSource | None = None) -> None:
        assert shard.relaying is not None
        self._shard, self._settings, self._relaying = shard, shard.settings, shard.relaying
        self._index = shard.settings.shard_index
        self._dtype = _TYPES[shard.settings.relay_type]
        self._source: CutSource = source or Source(shard.settings)
        self._layout: ModelLayout | None = None  # of the source's model
        self._layout_is_of: tuple[str, int] | None = None  # run and generation
        self._transfer: CutTransfer | None = None
        self._read_from: RelayedShard | None = None  # which completes residues
        self._digests: dict[tuple[RelayedShard, int], ModelDigest] = {}  # of the published and the staged version
        self._is_doubtful = False  # whether a difference from what is here has led to another digest than the cut's
        self._closing = threading.Event()
        self._tell: Callable[[], None] = lambda: None
        self._complained_at, self._unknown = -math.inf, ""
        self._thread: threading.Thread | None = None
        if shard.is_coordinator:
            shard.cuts.may_begin = self.is_together

    def start(self, tell: Callable[[], None] = lambda: None) -> None:
        """Begin to follow the source; ``tell`` has shard 0 hear what this shard has."""
        self._tell = tell
        self._thread = threading.Thread(target=self._work, name="relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Break off the calls that are under way, and end the thread."""
        self._closing.set()
        self._relaying.aimed.set()
        self._source.close()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        pause, known = _SHORTEST_PAUSE_SECONDS, None
        while not self._closing.is_set():
            try:
                if self._shard.is_coordinator:
                    known = self._follow(known)
                else:
                    self._keep_up()
                pause = _SHORTEST_PAUSE_SECONDS
                self._recovered()
                continue
            except (SourceError, Rejected) as error:
                self._complain(str(error))
            except Exception as error:  # whatever it was, the thread lives on and asks again
                self._complain(repr(error))
                if repr(error) != self._unknown:
                    self._unknown = repr(error)
                    log.exception("the source cannot be followed", exc_info=error)
            known = None
            self._rest(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _rest(self, seconds: float) -> None:
        """Wait, on other shards than shard 0 until there is another target."""
        if self._shard.is_coordinator:
            self._closing.wait(seconds)
        else:
            self._relaying.aimed.wait(seconds)
            self._relaying.aimed.clear()

    # Shard 0

    def _follow(self, known: Cut | None) -> Cut:
        """Wait for a newer cut than the known one, and publish it once all shards have staged it; return it."""
        shard, relaying = self._shard, self._relaying
        if relaying.target is None:  # after a start: the source may be away, and all shards have what is staged
            self._await(lambda: self.publish() or not self._is_staged(), _OTHERS_SECONDS)
        state = RUN_STATES[shard.run.state] if known is not None else pb.RUN_STATE_UNSPECIFIED
        name = f"relay {socket.gethostname()} {self._settings.listen}"
        layout = self._layout
        fingerprint = layout.fingerprint if layout is not None else b""
        seconds = FIRST_WAIT_SECONDS if known is None else WAIT_SECONDS
        asked = question(known, fingerprint, state, self._dtype, name, seconds, relaying.relays())
        answer = self._source.await_cut(asked)
        if answer.HasField("layout"):
            self._layout = unpack_layout(answer.layout)
        cut = Cut.from_message(answer.cut)
        self._require_shards(cut)
        if cut != known or relaying.target is None:
            relaying.aim(cut)
            shard.tell_shards()
            self.fetch(cut)
            self._await(lambda: relaying.others_have(cut.name) or relaying.some_failed(cut.name), math.inf)
            if not relaying.others_have(cut.name):
                raise SourceError("a shard of the relay has not got its part of a cut: see the shards' logs")
            self.publish()
            self._await(lambda: not shard.cuts.is_asked or self.is_readable(cut), _READABLE_SECONDS)
        if answer.run_state == pb.RUN_STATE_FINISHED and not shard.run.is_finished:
            shard.apply_thread.run(lambda: shard.commit(rec.Finished()))
            shard.tell_shards()
        return cut

    def publish(self) -> bool:
        """Publish the staged cut if every shard has it; return whether. Raises :class:`Rejected`."""
        return publish_relayed(self._shard)

    def _is_staged(self) -> bool:
        model = self._shard.model
        return isinstance(model, RelayedShard) and model.staged.is_there

    def is_together(self) -> bool:
        """Tell whether every shard has the cut of the source that is published here."""
        model = self._shard.model
        return isinstance(model, RelayedShard) and self._relaying.others_have(model.publication)

    def is_readable(self, cut: Cut) -> bool:
        """Tell whether readers get a cut."""
        newest = self._shard.cuts.newest
        shards = None if newest is None else next(iter(newest.shards.values()))
        return shards is not None and [each[:2] for each in shards] == [each[:2] for each in cut.shards]

    def _await(self, condition: Callable[[], bool], seconds: float) -> None:
        end = self._shard.environment.monotonic() + seconds
        while not condition() and self._shard.environment.monotonic() < end and not self._closing.is_set():
            self._closing.wait(_POLL_SECONDS)

    # Other shards

    def _keep_up(self) -> None:
        """Stage this shard's part of the target, and tell shard 0; wait for another target if it is here."""
        relaying, cut = self._relaying, self._relaying.target
        if cut is None or self.has_part(cut):
            self._rest(_LOOK_SECONDS)
            return
        try:
            self.fetch(cut)
        finally:
            relaying.failed = "" if self.has_part(cut) else cut.name
            self._tell()

    # Every shard

    def _complain(self, why: str) -> None:
        """Note that the source is lost; log it at first, and then once a minute."""
        if self._closing.is_set():
            return
        now = self._shard.environment.monotonic()
        self._relaying.lose(why)
        if now - self._complained_at >= _COMPLAINT_SECONDS:
            self._complained_at = now
            log.warning(
                "the source cannot be followed: readers keep the version that is here",
                extra={"source": self._settings.relay_of, "error": why},
            )

    def _recovered(self) -> None:
        if self._relaying.find():
            self._complained_at, self._unknown = -math.inf, ""
            log.info("the source is followed", extra={"source": self._settings.relay_of})

    def has_part(self, cut: Cut) -> bool:
        """Tell whether this shard's part of a cut is here, published or staged."""
        model = self._shard.model
        return isinstance(model, RelayedShard) and self._is_of(cut.run_id) and cut.name in model.cuts_here()

    def fetch(self, cut: Cut) -> None:
        """Stage this shard's part of a cut, unless it is here; raises :class:`Rejected` and :class:`SourceError`."""
        self._require_shards(cut)
        if self.has_part(cut):
            return
        layout = self._layout_of(cut)
        span = layout.shard_spans(self._settings.num_shards)[self._index]
        base = self._base(cut, layout)
        held, known = None, b""
        if base is not None:
            mine = ShardVersion(base.generation, base.version, self._digest_of(base).value)
            held, known = Cut(cut.run_id, tuple(mine for _ in cut.shards)), self._buffers()
        part = cut.shards[self._index]
        if held is not None and held.shards[self._index] == part and self._has_buffers(cut):
            fetched = FetchedShard(part, part, [], b"", 0, 0.0)  # other shards alone have moved
        else:
            transfer, self._read_from = self._transfer_of(layout, span), base
            fetched = self._source.read(transfer, cut, held, known)
            transfer.end()
        self._take(cut, layout, span, base, fetched)

    def _require_shards(self, cut: Cut) -> None:
        if len(cut.shards) != self._settings.num_shards:
            raise Rejected(
                ErrorCode.SHARD_MISMATCH,
                f"the source has {len(cut.shards)} shards, this relay {self._settings.num_shards}: start the relay "
                "again, with another --data-dir",
            )

    def _take(
        self, cut: Cut, layout: ModelLayout, span: Span, base: RelayedShard | None, fetched: FetchedShard
    ) -> None:
        """Check a fetched part, a difference from a model or all, and stage it."""
        part, shard = cut.shards[self._index], self._shard
        buffers = fetched.buffers
        if self._wanted_buffers(cut) and digest_of_buffers(buffers or self._buffers()) != self._wanted_buffers(cut):
            raise Rejected(ErrorCode.BAD_COMMIT, "the source has sent other buffers than those of the cut")
        update, is_whole = merge(span, fetched.changes), fetched.base is None
        before = 0 if fetched.base is None else fetched.base.version
        if is_whole:
            if update is None or update.offsets is not None:
                raise Rejected(ErrorCode.BAD_COMMIT, "the source has not sent all of the model")
            digest = ModelDigest(layout)
            for piece in _pieces(update):
                digest.add(piece)
        else:
            assert base is not None
            digest = ModelDigest(layout, self._digest_of(base).value)
            if update is not None:
                digest.remove(_read(base, update))
                digest.add(update)
            self._require_base(base, before)  # or what was read may be of two versions
        if digest.value != part.digest:
            self._digests, self._is_doubtful = {}, True
            raise Rejected(ErrorCode.BAD_COMMIT, "what the source has sent has another digest than its cut")
        model = shard.model
        if model is None or not self._is_of(cut.run_id) or model.layout.fingerprint != layout.fingerprint:
            assert update is not None
            self._install(cut, layout, span, update, buffers)
        else:
            record = rec.Relayed(
                generation=part.generation,
                version=part.version,
                before=before,
                buffers=buffers,
                name=cut.name,
                whole=is_whole,
            )
            self._commit(record, None if is_whole else base, update)
        assert isinstance(shard.model, RelayedShard)
        staged = shard.model.base(part.generation) or shard.model
        known = {key: each for key, each in self._digests.items() if key == (shard.model, shard.model.version)}
        self._digests, self._is_doubtful = known | {(staged, part.version): digest}, False
        log.debug("version staged", extra={"version": part.version, "bytes": fetched.received_bytes})

    def _require_base(self, base: RelayedShard, version: int) -> None:
        """Raise :class:`Rejected` (``BUSY``) if a model has gone on from a version, or another has its place."""
        model = self._shard.model
        if not isinstance(model, RelayedShard) or model.base(base.generation, version) is not base:
            raise Rejected(ErrorCode.BUSY, "a version was published while another one was fetched")

    def _commit(self, record: rec.Relayed, base: RelayedShard | None, update: SparseSlice | None) -> None:
        """Write down a difference from a model, or all values, and stage it."""
        shard, model = self._shard, self._shard.model
        body = shard.durability.records.body(messages_of(update, shard.span, self._settings.chunk_bytes))
        there = on_device(update, shard.device)

        def job() -> None:
            target = self._relaying.target
            if shard.model is not model or target is None or target.name != record.name:
                raise Rejected(ErrorCode.BUSY, "another cut was published, or is wanted, by now")
            if base is not None:
                self._require_base(base, record.before)
            shard.commit(record, there, body)

        shard.apply_thread.run(job)
        shard.wait_until_durable()

    def _install(self, cut: Cut, layout: ModelLayout, span: Span, update: SparseSlice, buffers: bytes) -> None:
        """Put a whole model in the place of this shard's at once: the first one, or that of another run or layout."""
        shard, part = self._shard, cut.shards[self._index]

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
            model.staged.published = part.version, cut.name
            average = BufferAverage(layout.buffers, unpack(buffers, layout.buffers)) if buffers else None
            state = shard.state.with_model(
                model, average, Datasets(), run_id=cut.run_id, run_state=RunState.TRAINING, samples=0
            )
            state.run.agree(METHOD, SETTINGS)
            return state

        with shard.join_lock:
            model_install.claim(shard)
        model_install.install(shard, make)
        shard.tell_shards()

    def _layout_of(self, cut: Cut) -> ModelLayout:
        """Return the layout of the source's model, in the type in which this relay holds it."""
        of = cut.run_id, cut.shards[0].generation
        if self._layout is None or self._layout_is_of != of:
            known = b"" if self._layout is None else self._layout.fingerprint
            answer = self._source.await_cut(
                question(None, known, pb.RUN_STATE_UNSPECIFIED, self._dtype, "", FIRST_WAIT_SECONDS)
            )
            if answer.HasField("layout"):
                self._layout = unpack_layout(answer.layout)
            self._layout_is_of = of
        assert self._layout is not None
        return self._layout if self._dtype is None else self._layout.viewed_in(self._dtype)

    def _base(self, cut: Cut, layout: ModelLayout) -> RelayedShard | None:
        """Return the model, here or staged, from which a difference leads to a cut; ``None`` if all is fetched."""
        model, part = self._shard.model, cut.shards[self._index]
        if self._is_doubtful or not isinstance(model, RelayedShard) or not self._is_of(cut.run_id):
            return None
        base = model.base(part.generation)
        if base is None or base.layout.fingerprint != layout.fingerprint or base.version > part.version:
            return None
        if base.version == part.version and self._digest_of(base).value != part.digest:
            return None  # with WAGMA a version has other values at another time
        return base

    def _transfer_of(self, layout: ModelLayout, span: Span) -> CutTransfer:
        """Return the transfer that goes on where the one before was broken off."""

        def read(entries: SparseSlice) -> SparseSlice | None:
            return None if self._read_from is None else _read(self._read_from, entries)

        if (
            self._transfer is None
            or self._transfer.layout.fingerprint != layout.fingerprint
            or self._transfer.span != span
        ):
            self._transfer = CutTransfer(self._index, layout, span, self._dtype, read)
        return self._transfer

    def _digest_of(self, model: RelayedShard) -> ModelDigest:
        """Return the digest of a model's values, which this thread alone stages, and one thread publishes."""
        key = model, model.version
        if key not in self._digests:
            digest = ModelDigest(model.layout)
            for part in cut_span(model.span, _BLOCK):
                digest.add(_read(model, SparseSlice(part, None, torch.empty(0, dtype=torch.float32, device="cpu"))))
            self._digests[key] = digest
        return self._digests[key]

    def _is_of(self, run_id: str) -> bool:
        return self._shard.run.run_id == run_id

    def _buffers(self) -> bytes:
        """Return the buffers, packed; empty if there are none."""
        buffers, model = self._shard.buffers_now(), self._shard.model
        return pack(buffers[spec.name] for spec in model.layout.buffers) if buffers and model is not None else b""

    def _has_buffers(self, cut: Cut) -> bool:
        """Tell whether the published buffers are those of a cut, on shard 0."""
        packed, wanted = self._buffers(), self._wanted_buffers(cut)
        return not wanted or (digest_of_buffers(packed) if packed else b"") == wanted

    def _wanted_buffers(self, cut: Cut) -> bytes:
        """Return the digest of the buffers that this shard is to have: shard 0 has them all."""
        return cut.buffers_digest if self._index == 0 else b""


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
