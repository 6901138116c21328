"""Answers to pulls: exact differences, and top-k with an image of the worker's replica (docs/protocol.md, *A pull*)."""

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Protocol, TypeVar

import torch

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice, entries
from pscore.select import entries_for
from pscore.telemetry.tracing import traced
from pscore.wire import frames
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.frames import WireForm
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.model.changelog import ChangedIndices, union
from psservice.model.image_budget import Claim
from psservice.model.parameters import Difference, ModelShard
from psservice.model.topk import DifferenceSelection, TopKSettings
from psservice.policy.reply_mode import ReplyRule

Result = TypeVar("Result")

Reserve = Callable[[int], None]
"""Charges bytes before they are occupied; raises :class:`Rejected` (``BUSY``) where they may not be."""

_SPARSE_ENTRY_BYTES = 24
"""Of an answer while it is made: int64 offset, fp32 value, and the union that they come from."""

_PENDING_ENTRY_BYTES = 20
"""Of a top-k reply that is kept until it is acknowledged: as it was written, and as it is added to the image."""


class Writer(Protocol):
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
        replica_is_image: the request's ``image`` field.
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


class _Kind(Enum):
    PROPOSED = auto()  # exact reply that opens an image
    TOPK = auto()  # difference to be added to the image
    CLOSING = auto()  # exact reply that ends an image


@dataclass(slots=True)
class _Pending:
    """A reply whose acknowledgement changes what the server keeps."""

    kind: _Kind
    reply: Reply
    prior: int  # the acknowledgement that came with the pull it answers
    image: torch.Tensor | None = None  # PROPOSED: the image to be
    claim: Claim | None = None  # and its room


@dataclass
class ReplySession:
    """What the server keeps of one worker's replies: a rule, and in top-k mode the image and the pending reply.

    Without any tensor as long as the worker is answered exactly. ``lock`` is held while a reply is made.
    """

    rule: ReplyRule
    image: torch.Tensor | None = None
    pending: _Pending | None = None
    selection: DifferenceSelection | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    _claim: Claim | None = None
    _number: int = field(default_factory=lambda: secrets.randbits(48))
    _base_marker: tuple[int, int] | None = None

    def has_acknowledged(self, model_id: int, acknowledged: int) -> bool:
        """Tell whether a worker has applied a reply that was made since the first question about this model."""
        if self._base_marker is None or self._base_marker[0] != model_id:
            self._base_marker = model_id, self._number
            return False
        return self._base_marker[1] < acknowledged <= self._number

    def next_number(self) -> int:
        """Draw the next reply's number."""
        self._number += 1
        return self._number

    def acknowledge(self, acknowledged: int) -> Reply | None:
        """Apply an acknowledgement; return a reply that must be repeated, or ``None`` to make a new one."""
        pending, self.pending = self.pending, None
        if pending is None:
            return None
        if acknowledged == pending.reply.number:
            if pending.kind is _Kind.PROPOSED:
                self.image, self._claim = pending.image, pending.claim
            elif pending.kind is _Kind.CLOSING:
                self.drop_image()
            elif self.image is not None:
                _add(self.image, pending.reply.segments)
        elif pending.kind is not _Kind.PROPOSED:
            if acknowledged == pending.prior:
                self.pending = pending
                return pending.reply
            self.drop_image()
        return None

    def drop_image(self) -> None:
        """Free everything that is kept of the replica."""
        self.image = self.selection = self._claim = None


def _add(image: torch.Tensor, segments: list[SparseSlice]) -> None:
    """``θ̂ += q`` over a shard; the segments of a top-k reply all lie in the shard's span, counted from its start."""
    for segment in segments:
        if segment.offsets is None:
            image.add_(segment.values)
        else:
            image.index_add_(0, segment.offsets, segment.values)


@traced("select")
def answer(
    model: ModelShard,
    writer: Writer,
    session: ReplySession,
    topk: TopKSettings,
    request: PullRequest,
    form: WireForm,
    reserve: Reserve = lambda nbytes: None,
) -> Reply:
    """Answer one pull; locks the session. Raises :class:`Rejected` (``VERSION_IN_FUTURE``, ``BUSY``)."""
    base = request.base_version
    if base is not None and base > model.version:
        raise Rejected(ErrorCode.VERSION_IN_FUTURE, f"the replica has version {base}, the server {model.version}")
    making = _Making(model, writer, session, topk, request, form, reserve)
    with session.lock:
        repeated = session.acknowledge(request.acknowledged)
        if repeated is not None:
            return repeated
        if session.image is not None and request.replica_is_image and base is not None:
            return making.from_image(session.image, base)
        session.drop_image()
        return making.exact(None if request.replica_is_image else base)


@dataclass(frozen=True, slots=True)
class _Making:
    """One reply in the making; the session's lock is held."""

    model: ModelShard
    writer: Writer
    session: ReplySession
    topk: TopKSettings
    request: PullRequest
    form: WireForm
    reserve: Reserve

    def exact(self, base: int | None) -> Reply:
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
        if early is None and base is not None and (model.densified or model.changelog.has_dropped(base)):
            density = 1.0  # sparse pushes have changed everything: the replies need not be dense because of that
        wanted = self.session.rule.wants_topk(density, in_topk=False)
        claim = self.topk.images.claim(self._image_bytes()) if wanted else None

        def read() -> tuple[Difference, torch.Tensor, torch.Tensor | None]:
            late = model.changelog.since(early_version)
            all_changes = None if early is None or late is None else [early, *late]
            self.reserve(max(0, self._exact_bytes(all_changes) - reserved))
            difference = model.difference(early_version, early)
            rest = model.theta[size - lacking.length :].clone()
            return difference, rest, model.rounded() if claim is not None else None

        difference, rest, image = self.writer.run(read)
        offsets = None if difference.changed is None else difference.changed.long()
        inside = SparseSlice(model.span, offsets, difference.values).clip(had)
        segments = [] if inside is None else model.as_sent(inside)
        if lacking.length:
            segments += model.as_sent(SparseSlice(lacking, None, rest))
        sent = entries(segments) / size
        number, opens = self.session.next_number(), image is not None
        reply = Reply(ReplyMode.EXACT, number, difference.version, segments, sent, sent, opens, self.form)
        if image is not None:
            self.session.pending = _Pending(_Kind.PROPOSED, reply, self.request.acknowledged, image, claim)
        return reply

    def from_image(self, image: torch.Tensor, base: int) -> Reply:
        """Send the largest differences from the image or, where the rule wants no more of that, all of them."""
        changes = self.model.changelog.since(base)
        # An upper bound on the union is enough for the rule here, and costs nothing.
        sizes = [changed.numel() for changed in changes or () if changed is not None]
        known = changes is not None and len(sizes) == len(changes)
        density = min(1.0, sum(sizes) / self.model.span.length) if known else None
        if self.session.rule.wants_topk(density, in_topk=True):
            kind, reply = _Kind.TOPK, self._topk(image, 1.0 if density is None else density)
        else:
            kind, reply = _Kind.CLOSING, self._closing(image, 1.0 if density is None else density)
        self.session.pending = _Pending(kind, reply, self.request.acknowledged)
        return reply

    def _topk(self, image: torch.Tensor, changed_density: float) -> Reply:
        model, session = self.model, self.session
        self.reserve(_SPARSE_ENTRY_BYTES * self._topk_entries())
        # Beside the writer, so that pulls of several workers select at the same time. A concurrent push is sent now
        # or later; either way the image becomes what the worker has.
        version = model.version
        selection = session.selection = session.selection or DifferenceSelection(self.topk)
        since = None if selection.version is None else model.changelog.since(selection.version)
        taken = selection.select(model.theta, image, model.layout, model.span, version, since)
        chunks: tuple[pb.Chunk, ...] = ()
        segments = []
        if taken.offsets.numel():
            form = replace(self.form, value=self.topk.value)
            encoded = list(frames.encode(SparseSlice(model.span, *taken), form, chunk_bytes=self.topk.chunk_bytes))
            arrived = torch.cat([piece.decoded for piece in encoded]).to(taken.values.device)
            chunks = tuple(piece.chunk for piece in encoded)
            segments = [SparseSlice(model.span, taken.offsets, arrived)]
            selection.sent(taken, arrived)
        sent = taken.offsets.numel() / model.span.length
        number = session.next_number()
        return Reply(ReplyMode.TOPK, number, version, segments, sent, changed_density, True, self.form, chunks)

    def _closing(self, image: torch.Tensor, changed_density: float) -> Reply:
        model, size = self.model, self.model.span.length
        self.reserve(5 * size)  # the values, and where they differ
        version, rounded = self.writer.run(lambda: (model.version, model.rounded()))
        differs = rounded.view(torch.int32) != image.view(torch.int32)  # bits, so that −0 is not taken for +0
        self.reserve(_SPARSE_ENTRY_BYTES * int(differs.sum()))
        offsets = differs.nonzero().view(-1)
        segments = model.as_sent(SparseSlice(model.span, offsets, rounded[offsets]))
        sent, number = offsets.numel() / size, self.session.next_number()
        return Reply(ReplyMode.EXACT, number, version, segments, sent, changed_density, False, self.form)

    def _exact_bytes(self, changes: list[ChangedIndices] | None) -> int:
        """Return the most bytes of an exact answer over these changes; ``None`` for every element."""
        known = [changed for changed in changes or () if changed is not None]
        if changes is None or len(known) < len(changes):
            return 8 * self.model.span.length  # fp32, and once more in the parameters' own dtype
        return _SPARSE_ENTRY_BYTES * min(self.model.span.length, sum(changed.numel() for changed in known))

    def _topk_entries(self) -> int:
        """Count the entries of a top-k reply; a selector that takes about k may take a few more."""
        topk = self.topk
        lengths = [common.length for _, common in self.model.layout.overlapping(self.model.span)]
        return sum(n if n < topk.dense_below else entries_for(n, topk.density) for n in lengths)

    def _image_bytes(self) -> int:
        """Return the bytes of an image: fp32 values, and the pending reply."""
        return 4 * self.model.span.length + _PENDING_ENTRY_BYTES * self._topk_entries()
