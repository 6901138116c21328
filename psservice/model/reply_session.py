"""Answers to pulls: exact differences, and top-k with an image of the worker's replica (docs/protocol.md, *A pull*)."""

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol, TypeVar

import torch

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice, entries
from pscore.telemetry.tracing import traced
from pscore.wire import frames
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.frames import WireForm
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.model.changelog import ChangedIndices, union
from psservice.model.parameters import ModelShard
from psservice.model.topk import DifferenceSelection, TopKSettings
from psservice.policy.reply_mode import ReplyRule

Result = TypeVar("Result")

Reserve = Callable[[int], None]
"""Charges bytes before they are occupied; raises :class:`Rejected` (``BUSY``) where they may not be."""

_SPARSE_ENTRY_BYTES = 24
"""Of an answer while it is made: int64 offset, fp32 value, and the union that they come from."""

_PENDING_ENTRY_BYTES = 20
"""Of a top-k reply that is kept until it is acknowledged: as it was written, and as it is added to the image."""


class ParameterThread(Protocol):
    """The thread that owns the parameters."""

    def run(self, job: Callable[[], Result]) -> Result:
        """Run a job on that thread; raises :class:`Rejected` (``BUSY``)."""


class ReplyMode(Enum):
    """The meaning of a reply's entries: values to write, or fp32 differences to add."""

    EXACT = "exact"
    TOPK = "topk"


@dataclass(frozen=True, slots=True)
class PullRequest:
    """What a worker says of its replica when it pulls.

    Attributes:
        base_version: ``None`` if the worker has nothing.
        acknowledged: number of the last reply that the worker has applied.
        base_end: index from which on the worker has nothing; 0 where it has all of ``base_version``.
    """

    base_version: int | None = None
    acknowledged: int = 0
    replica_is_image: bool = False
    base_end: int = 0
    link_bytes_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer to a pull.

    Attributes:
        number: what the worker acknowledges with its next pull.
        version: of the replica afterwards.
        segments: the entries, in forward order, as the worker will have them.
        density: entries over elements; ``changed_density`` of the changes since the replica's version, 1 where unknown.
        image: whether the server keeps (or proposes) an image from this reply on.
        chunks: the segments as written, where the bytes must not change when the reply is repeated (top-k).
    """

    mode: ReplyMode
    number: int
    version: int
    segments: list[SparseSlice]
    density: float
    changed_density: float
    image: bool
    form: WireForm
    chunks: tuple[pb.Chunk, ...] | None = None


@dataclass(slots=True)
class _Pending:
    """A reply whose acknowledgement changes what the server keeps.

    A top-k reply is added to the image. An exact reply opens ``image``, or ends the present one where that is ``None``.
    """

    reply: Reply
    prior: int  # the acknowledgement that came with the pull it answers
    image: torch.Tensor | None = None


@dataclass
class ReplySession:
    """What the server keeps of one worker's replies: a rule, and in top-k mode the image and the pending reply.

    Without any tensor as long as the worker is answered exactly. ``lock`` is held while a reply is made.
    """

    rule: ReplyRule
    image: torch.Tensor | None = None
    pending: _Pending | None = None
    selection: DifferenceSelection | None = None
    number: int = field(default_factory=lambda: secrets.randbits(48))  # of the last reply
    lock: threading.Lock = field(default_factory=threading.Lock)
    _base_marker: tuple[int, int] | None = None

    def has_acknowledged(self, model_id: int, acknowledged: int) -> bool:
        """Tell whether a worker has applied a reply that was made since the first question about this model."""
        if self._base_marker is None or self._base_marker[0] != model_id:
            self._base_marker = model_id, self.number
            return False
        return self._base_marker[1] < acknowledged <= self.number

    def acknowledge(self, acknowledged: int) -> Reply | None:
        """Apply an acknowledgement; return a reply that must be repeated, or ``None`` to make a new one."""
        pending, self.pending = self.pending, None
        if pending is None:
            return None
        if acknowledged == pending.reply.number:
            if pending.reply.mode is ReplyMode.TOPK:
                assert self.image is not None
                for segment in pending.reply.segments:  # over the shard's span, with distinct offsets
                    self.image[segment.offsets] += segment.values
            elif pending.image is not None:
                self.image = pending.image
            else:
                self.drop_image()
        elif pending.image is None:
            if acknowledged == pending.prior:
                self.pending = pending
                return pending.reply
            self.drop_image()
        return None

    def drop_image(self) -> None:
        """Free everything that is kept of the replica."""
        self.image = self.selection = None


@dataclass(frozen=True, slots=True)
class ReplyMaker:
    """Makes one reply: ``model`` answers ``request``, and ``reserve`` is told what the reply will occupy."""

    model: ModelShard
    apply_thread: ParameterThread
    session: ReplySession
    topk: TopKSettings
    request: PullRequest
    form: WireForm
    reserve: Reserve = lambda nbytes: None

    @traced("select")
    def answer(self) -> Reply:
        """Answer the pull; locks the session. Raises :class:`Rejected` (``VERSION_IN_FUTURE``, ``BUSY``)."""
        base, session = self.request.base_version, self.session
        if base is not None and base > self.model.version:
            raise Rejected(
                ErrorCode.VERSION_IN_FUTURE, f"the replica has version {base}, the server {self.model.version}"
            )
        with session.lock:
            repeated = session.acknowledge(self.request.acknowledged)
            if repeated is not None:
                return repeated
            if session.image is not None and self.request.replica_is_image and base is not None:
                return self._from_image(session.image, base)
            session.drop_image()
            return self._exact(None if self.request.replica_is_image else base)

    def _exact(self, base: int | None) -> Reply:
        """Send the values of everything that changed since ``base``, and propose an image where the rule wants one."""
        model, size = self.model, self.model.span.length
        had = Span(model.span.start, self.request.base_end or model.span.end)
        lacking = Span(had.end, model.span.end)
        early_version = model.version
        changes = None if base is None else model.changelog.since(base)
        reserved = 8 * lacking.length + self._exact_bytes(changes)
        self.reserve(reserved)
        early: ChangedIndices = None if changes is None else union(changes, size)
        density = None if early is None or lacking.length else early.numel() / size
        if base is not None and (changes is None or (early is None and model.densified)):
            density = 1.0  # sparse pushes have changed everything: the replies need not be dense because of that
        image_bytes = 4 * size + _PENDING_ENTRY_BYTES * self._topk_entries()
        opens_image = self.session.rule.wants_topk(density, in_topk=False)

        def read() -> tuple[int, SparseSlice, torch.Tensor, torch.Tensor | None]:
            late = model.changelog.since(early_version)
            all_changes = None if early is None or late is None else [early, *late]
            self.reserve(max(0, self._exact_bytes(all_changes) - reserved))
            rest = model.theta[size - lacking.length :].clone()
            image = self.topk.images.make(image_bytes, model.rounded) if opens_image else None
            return model.version, model.changed_values(all_changes), rest, image

        version, changed, rest, image = self.apply_thread.run(read)
        inside = changed.clip(had)
        segments = [] if inside is None else model.as_sent(inside)
        if lacking.length:
            segments += model.as_sent(SparseSlice(lacking, None, rest))
        reply = self._reply(ReplyMode.EXACT, version, segments, has_image=image is not None)
        if image is not None:
            self.session.pending = _Pending(reply, self.request.acknowledged, image)
        return reply

    def _from_image(self, image: torch.Tensor, base: int) -> Reply:
        """Send the largest differences from the image or, where the rule wants no more of that, all of them."""
        # An upper bound on the union is enough for the rule here, and costs nothing.
        most = self._most_changed(self.model.changelog.since(base))
        density = None if most is None else most / self.model.span.length
        make = self._topk if self.session.rule.wants_topk(density, in_topk=True) else self._closing
        reply = make(image, 1.0 if density is None else density)
        self.session.pending = _Pending(reply, self.request.acknowledged)
        return reply

    def _topk(self, image: torch.Tensor, changed_density: float) -> Reply:
        model, session = self.model, self.session
        self.reserve(_SPARSE_ENTRY_BYTES * self._topk_entries())
        # Beside the apply thread, so that pulls of several workers select at the same time. A concurrent push is sent
        # now or later; either way the image becomes what the worker has.
        selection = session.selection = session.selection or DifferenceSelection(self.topk)
        version, taken = selection.select(model, image)
        chunks: tuple[pb.Chunk, ...] = ()
        segments = []
        if taken.offsets.numel():
            form = replace(self.form, value=self.topk.value)
            encoded = list(frames.encode(SparseSlice(model.span, *taken), form, chunk_bytes=self.topk.chunk_bytes))
            arrived = torch.cat([piece.decoded for piece in encoded]).to(taken.values.device)
            chunks = tuple(piece.chunk for piece in encoded)
            segments = [SparseSlice(model.span, taken.offsets, arrived)]
            selection.sent(taken, arrived)
        return self._reply(ReplyMode.TOPK, version, segments, changed_density, has_image=True, chunks=chunks)

    def _closing(self, image: torch.Tensor, changed_density: float) -> Reply:
        model, size = self.model, self.model.span.length
        self.reserve(5 * size)  # the values, and where they differ
        version, rounded = self.apply_thread.run(lambda: (model.version, model.rounded()))
        differs = rounded.view(torch.int32) != image.view(torch.int32)  # bits, so that −0 is not taken for +0
        self.reserve(_SPARSE_ENTRY_BYTES * int(differs.sum()))
        offsets = differs.nonzero().view(-1)
        segments = model.as_sent(SparseSlice(model.span, offsets, rounded[offsets]))
        return self._reply(ReplyMode.EXACT, version, segments, changed_density)

    def _reply(
        self,
        mode: ReplyMode,
        version: int,
        segments: list[SparseSlice],
        changed_density: float | None = None,
        *,
        has_image: bool = False,
        chunks: tuple[pb.Chunk, ...] | None = None,
    ) -> Reply:
        """Number a reply; an exact one has all that changed, so ``changed_density`` is then its own."""
        self.session.number += 1
        sent = entries(segments) / self.model.span.length
        changed = sent if changed_density is None else changed_density
        return Reply(mode, self.session.number, version, segments, sent, changed, has_image, self.form, chunks)

    def _most_changed(self, changes: list[ChangedIndices] | None) -> int | None:
        """Bound the entries of a union; ``None`` for every element."""
        known = [changed.numel() for changed in changes or () if changed is not None]
        return None if changes is None or len(known) < len(changes) else min(self.model.span.length, sum(known))

    def _exact_bytes(self, changes: list[ChangedIndices] | None) -> int:
        """Return the most bytes of an exact answer over these changes; all of fp32 is there in its own dtype too."""
        most = self._most_changed(changes)
        return 8 * self.model.span.length if most is None else _SPARSE_ENTRY_BYTES * most

    def _topk_entries(self) -> int:
        """Count the entries of a top-k reply; a selector that takes about k may take a few more."""
        return sum(self.topk.entries(common.length) for _, common in self.model.layout.overlapping(self.model.span))
