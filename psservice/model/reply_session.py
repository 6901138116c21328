"""Answers to pulls: exact differences, and top-k with an image of the worker's replica (docs/protocol.md, *A pull*)."""

import secrets
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import torch

from pscore.model.layout import Span
from pscore.model.segment import Segment, entries
from pscore.select import entries_for
from pscore.telemetry.tracing import traced
from pscore.wire import frames
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.frames import WireForm
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.model.changelog import ChangedIndices, union
from psservice.model.image_budget import Claim, ImageBudget
from psservice.model.parameters import Difference, ModelShard
from psservice.model.topk import DifferenceSelection, DownSettings
from psservice.policy.reply_mode import ReplyRule
from psservice.shard.apply_thread import Writer

Reserve = Callable[[int], None]
"""Charges bytes before they are occupied; raises :class:`Rejected` (``BUSY``) where they may not be."""

_SPARSE_ENTRY_BYTES = 24
"""Of an answer while it is made: int64 offset, fp32 value, and the union that they come from."""

_OWED_ENTRY_BYTES = 20
"""Of a top-k reply that is kept until it is acknowledged: as it was written, and as it is added to the image."""


class ReplyMode(Enum):
    """What the entries of a reply are."""

    EXACT = "exact"
    TOPK = "topk"


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer to a pull.

    Attributes:
        mode: values to write, or fp32 differences to add.
        number: what the worker acknowledges with its next pull.
        version: version of the replica afterwards.
        segments: the entries, in forward order, as the worker will have them.
        chunks: the same, written, where the bytes must not change when the reply is repeated (top-k).
        density: entries over elements owned.
        changed_density: what changed since the replica's version; 1 where that is not known.
        image: whether the server keeps (or proposes) an image from this reply on.
        form: how the segments are to be written.
    """

    mode: ReplyMode
    number: int
    version: int
    segments: list[Segment]
    density: float
    changed_density: float
    image: bool
    form: WireForm
    chunks: tuple[pb.Chunk, ...] | None = None


@dataclass(frozen=True, slots=True)
class TopKSettings:
    """How a top-k reply is made and travels.

    Attributes:
        down: how it is selected.
        value: value codec, by its number in the proto.
        chunk_bytes: largest payload of a chunk.
        images: what images may occupy; where it is used up, no further worker is answered so.
    """

    down: DownSettings
    value: int
    chunk_bytes: int
    images: ImageBudget = field(default_factory=lambda: ImageBudget(sys.maxsize))


class _Kind(Enum):
    PROPOSED = auto()  # exact reply that opens an image
    TOPK = auto()  # difference to be added to the image
    CLOSING = auto()  # exact reply that ends an image


@dataclass(slots=True)
class _Owed:
    """A reply whose acknowledgement changes what the server holds."""

    kind: _Kind
    reply: Reply
    prior: int  # the acknowledgement that came with the pull it answers
    tensor: torch.Tensor | None = None  # PROPOSED: the image to be
    claim: Claim | None = None  # and its room


@dataclass
class ReplySession:
    """What the server keeps of one worker's way down: a rule, and in top-k mode the image and the reply owed.

    Empty (no tensor) as long as the worker is answered exactly.

    Attributes:
        selection: what is remembered of the image from reply to reply.
        claim: the image's room.
    """

    rule: ReplyRule
    image: torch.Tensor | None = None
    owed: _Owed | None = None
    selection: DifferenceSelection | None = None
    claim: Claim | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    _number: int = field(default_factory=lambda: secrets.randbits(48))
    _fence: tuple[int, int] | None = None

    def has_acknowledged(self, born: int, acknowledged: int) -> bool:
        """Tell whether a worker has applied a reply that was made since this was first asked about a model.

        Args:
            born: tells the model from those that were answered from before.
            acknowledged: number of the last reply that the worker has applied.
        """
        if self._fence is None or self._fence[0] != born:
            self._fence = born, self._number
            return False
        return self._fence[1] < acknowledged <= self._number

    def next_number(self) -> int:
        """Draw the next reply's number."""
        self._number += 1
        return self._number

    def settle(self, acknowledged: int) -> Reply | None:
        """Take the acknowledgement in; return a reply that must be repeated, or ``None`` to make a new one."""
        owed, self.owed = self.owed, None
        if owed is None:
            return None
        if acknowledged == owed.reply.number:
            if owed.kind is _Kind.PROPOSED:
                self.image, self.claim = owed.tensor, owed.claim
            elif owed.kind is _Kind.CLOSING:
                self.drop_image()
            elif self.image is not None:
                add(self.image, owed.reply.segments)
            return None
        if owed.kind is not _Kind.PROPOSED:
            if acknowledged == owed.prior:
                self.owed = owed
                return owed.reply
            self.drop_image()
        return None

    def drop_image(self) -> None:
        """Keep nothing of the replica any more."""
        self.image = self.selection = self.claim = None


def add(image: torch.Tensor, segments: list[Segment]) -> None:
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
    downlink: ReplySession,
    topk: TopKSettings,
    *,
    base_version: int | None,
    acknowledged: int,
    replica_is_image: bool,
    form: WireForm,
    base_end: int = 0,
    reserve: Reserve = lambda nbytes: None,
) -> Reply:
    """Answer one pull.

    Args:
        model: the shard.
        writer: its writer thread.
        downlink: this worker's state; locked by this call.
        topk: how top-k replies select.
        base_version: version of the replica; ``None`` if the worker has none.
        acknowledged: number of the last reply that the worker has applied.
        replica_is_image: what that reply's ``image`` said.
        base_end: index from which on the worker has nothing; 0 where it has all of ``base_version``.
        form: which index codecs the worker reads, over which link.
        reserve: told what the answer occupies at most, before it is made.

    Raises:
        Refusal: ``VERSION_IN_FUTURE``, or ``BUSY`` from the writer or from ``reserve``; then no image is opened.
    """
    if base_version is not None and base_version > model.version:
        raise Rejected(
            ErrorCode.VERSION_IN_FUTURE, f"the replica has version {base_version}, the server {model.version}"
        )
    with downlink.lock:
        repeated = downlink.settle(acknowledged)
        if repeated is not None:
            return repeated
        if downlink.image is not None and replica_is_image and base_version is not None:
            return _answer_image(
                model, writer, downlink, topk, downlink.image, base_version, acknowledged, form, reserve
            )
        downlink.drop_image()
        base = None if replica_is_image else base_version
        return _answer_exact(model, writer, downlink, topk, base, base_end, acknowledged, form, reserve)


def _answer_exact(
    model: ModelShard,
    writer: Writer,
    downlink: ReplySession,
    topk: TopKSettings,
    base: int | None,
    base_end: int,
    acknowledged: int,
    form: WireForm,
    reserve: Reserve,
) -> Reply:
    size = model.span.length
    had = Span(model.span.start, base_end or model.span.end)
    lacking = Span(had.end, model.span.end)
    early_version = model.version
    supports = None if base is None else model.ledger.since(base)
    reserved = 8 * lacking.length + _exact_bytes(model, supports)
    reserve(reserved)
    early: ChangedIndices = None if supports is None else union(supports, size)
    changed = None if early is None or lacking.length else early.numel() / size
    if early is None and base is not None and (model.spread or model.ledger.has_dropped(base)):
        changed = 1.0  # sparse pushes have changed everything: the way down need not be dense because of that
    wanted = downlink.rule.wants_topk(changed, in_topk=False)
    claim = topk.images.claim(_image_bytes(model, topk.down)) if wanted else None
    open_image = claim is not None

    def read() -> tuple[Difference, torch.Tensor, torch.Tensor | None]:
        late = model.ledger.since(early_version)
        reserve(max(0, _exact_bytes(model, None if early is None or late is None else [early, *late]) - reserved))
        difference = model.difference(early_version, early)
        rest = model.theta[model.span.length - lacking.length :].clone()
        return difference, rest, model.rounded() if open_image else None

    difference, rest, image = writer.run(read)
    support = None if difference.support is None else difference.support.long()
    changes = Segment(model.span, support, difference.values).clip(had)
    segments = [] if changes is None else model.as_sent(changes)
    if lacking.length:
        segments += model.as_sent(Segment(lacking, None, rest))
    density = entries(segments) / size
    reply = Reply(
        mode=ReplyMode.EXACT,
        number=downlink.next_number(),
        version=difference.version,
        segments=segments,
        density=density,
        changed_density=density,
        image=open_image,
        form=form,
    )
    if open_image:
        downlink.owed = _Owed(_Kind.PROPOSED, reply, acknowledged, image, claim)
    return reply


def _answer_image(
    model: ModelShard,
    writer: Writer,
    downlink: ReplySession,
    topk: TopKSettings,
    image: torch.Tensor,
    base: int,
    acknowledged: int,
    form: WireForm,
    reserve: Reserve,
) -> Reply:
    size = model.span.length
    supports = model.ledger.since(base)
    # An upper bound on the union is enough for the rule here, and costs nothing.
    sizes = None if supports is None else [support.numel() for support in supports if support is not None]
    changed = None if sizes is None or len(sizes) < len(supports or ()) else min(1.0, sum(sizes) / size)
    stay = downlink.rule.wants_topk(changed, in_topk=True)
    chunks: tuple[pb.Chunk, ...] | None = None
    if stay:
        reserve(_SPARSE_ENTRY_BYTES * _topk_entries(model, topk.down))
        # Beside the writer, so that pulls of several workers select at the same time. What a push changes meanwhile is
        # sent now or owed; either way the image becomes what the worker has.
        version = model.version
        selection = downlink.selection = downlink.selection or DifferenceSelection(topk.down)
        since = None if selection.version is None else model.ledger.since(selection.version)
        taken = selection.select(model.theta, image, model.layout, model.span, version, since)
        offsets = taken.offsets
        chunks, segments = _written(Segment(model.span, *taken), replace(form, value=topk.value), topk.chunk_bytes)
        if segments:
            selection.sent(taken, segments[0].values)
    else:
        reserve(5 * size)  # the values, and where they differ
        version, rounded = writer.run(lambda: (model.version, model.rounded()))
        differs = rounded.view(torch.int32) != image.view(torch.int32)  # bits, so that −0 is not taken for +0
        reserve(_SPARSE_ENTRY_BYTES * int(differs.sum()))
        offsets = differs.nonzero().view(-1)
        segments = model.as_sent(Segment(model.span, offsets, rounded[offsets]))
    reply = Reply(
        mode=ReplyMode.TOPK if stay else ReplyMode.EXACT,
        number=downlink.next_number(),
        version=version,
        segments=segments,
        density=offsets.numel() / size,
        changed_density=1.0 if changed is None else changed,
        image=stay,
        form=form,
        chunks=chunks,
    )
    downlink.owed = _Owed(_Kind.TOPK if stay else _Kind.CLOSING, reply, acknowledged)
    return reply


def _exact_bytes(model: ModelShard, supports: list[ChangedIndices] | None) -> int:
    """Return what an exact answer over these supports occupies at most; ``None`` for every element."""
    known = [support for support in supports or () if support is not None]
    if supports is None or len(known) < len(supports):
        return 8 * model.span.length  # fp32, and once more in the parameters' own dtype
    return _SPARSE_ENTRY_BYTES * min(model.span.length, sum(support.numel() for support in known))


def _topk_entries(model: ModelShard, down: DownSettings) -> int:
    """Return how many entries a top-k reply has; a selector that takes about k may take a few more."""
    lengths = [common.length for _, common in model.layout.overlapping(model.span)]
    return sum(n if n < down.dense_below else entries_for(n, down.density) for n in lengths)


def _image_bytes(model: ModelShard, down: DownSettings) -> int:
    """Return what an image occupies: fp32 values, and the reply that is owed."""
    return 4 * model.span.length + _OWED_ENTRY_BYTES * _topk_entries(model, down)


def _written(segment: Segment, form: WireForm, chunk_bytes: int) -> tuple[tuple[pb.Chunk, ...], list[Segment]]:
    """Write a segment; return the chunks, and the segment with the values that the worker will read from them."""
    if not segment.entries:
        return (), []
    encoded = list(frames.encode(segment, form, chunk_bytes=chunk_bytes))
    values = torch.cat([piece.decoded for piece in encoded]).to(segment.values.device)
    return tuple(piece.chunk for piece in encoded), [Segment(segment.span, segment.offsets, values)]
