"""Answers to pulls: exact differences, and top-k with an image of the worker's replica (docs/reference/protocol.md)."""

import secrets
import threading
from dataclasses import dataclass, field
from enum import Enum

import torch

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.telemetry.tracing import traced
from pscore.wire import frames
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.frames import WireForm
from psservice.model.changelog import most_changed
from psservice.model.parameters import ModelShard
from psservice.replies.exact_reply import (
    SPARSE_ENTRY_BYTES,
    Entries,
    ExactReplies,
    ParameterThread,
    Reserve,
)
from psservice.replies.reply_mode import ReplyRule
from psservice.replies.shared_reply import Messages, ReplyMessages
from psservice.replies.topk import DifferenceSelection, SelectedEntries, Sent, TopKSettings, add_at

_PENDING_ENTRY_BYTES = 24
"""Of a top-k reply that is kept until it is acknowledged: as selected, as written, and as it is added to the image."""


_KEPT_ENTRY_BYTES = 12
"""Upper bound of the written bytes of a reply that ends an image: kept until it is acknowledged."""


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
        base_end: index from which on the worker has nothing; 0 if it has all of ``base_version``.
        density: of a top-k reply, 0 for the server's; ``value``: the codec of its values then.
        pushes_all: whether the worker's pushes have every entry.
    """

    base_version: int | None = None
    acknowledged: int = 0
    replica_is_image: bool = False
    base_end: int = 0
    link_bytes_per_second: float = 0.0
    density: float = 0.0
    value: int = 0
    pushes_all: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer to a pull.

    Attributes:
        number: what the worker acknowledges with its next pull.
        version: of the replica afterwards.
        density: entries over elements; ``changed_density`` of the changes since the replica's version, 1 if unknown.
        image: whether the server keeps (or proposes) an image from this reply on.
        messages: those behind the header, serialised; every reader gets the same bytes.
    """

    mode: ReplyMode
    number: int
    version: int
    density: float
    changed_density: float
    image: bool
    messages: Messages


@dataclass(frozen=True, slots=True)
class _Proposal:
    """An exact reply whose acknowledgement opens an image. Its bytes are not kept: it is never repeated."""

    number: int
    image: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Pending:
    """A reply that is repeated until it is acknowledged, and that changes the image then.

    The ``added`` entries of a top-k reply are added to the image; an exact reply, which has none, ends the image.
    """

    reply: Reply
    prior: int  # the acknowledgement that came with the pull it answers
    added: Entries | None = None


@dataclass
class ReplySession:
    """What the server keeps of one worker's replies: a rule, and in top-k mode the image and the pending reply.

    Without any tensor as long as the worker is answered exactly. ``lock`` is held while a reply is made.
    """

    rule: ReplyRule
    image: torch.Tensor | None = None
    pending: _Pending | _Proposal | None = None
    selection: DifferenceSelection | None = None
    room: int = 0  # how many pending entries the image's budget already pays for
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
        if isinstance(pending, _Proposal):
            if acknowledged == pending.number:
                self.image = pending.image
        elif pending is not None:
            if acknowledged == pending.prior:
                self.pending = pending
                return pending.reply
            if acknowledged == pending.reply.number and pending.added is not None:
                assert self.image is not None
                add_at(self.image, *pending.added)
            else:
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
        """Send the values of everything that changed since ``base``, and propose an image if the rule wants one."""
        model, session, size = self.model, self.session, self.model.span.length
        had = Span(model.span.start, self.request.base_end or model.span.end)
        exact = ExactReplies(model, self.apply_thread, self.topk.chunk_bytes, self.reserve)
        shared = exact.since(base, had, self.form)
        density = None if shared.is_dense or had.end < model.span.end else shared.entries / size
        if shared.is_dense and base is not None and self._is_of_pushes(base):
            density = 1.0
        image = None
        if self._wants_topk(density, in_topk=False):

            def rounded() -> torch.Tensor:
                nonlocal shared
                copy = exact.copy()
                if shared.position != copy.position:
                    shared = exact.of(copy, base, had, self.form)
                return model.rounded(copy.read(model.span))

            session.room = self._topk_entries()
            image = self.topk.memory.make_image(4 * size + _PENDING_ENTRY_BYTES * session.room, rounded)
        reply = self._reply(ReplyMode.EXACT, shared.version, shared.entries, shared.messages, image=image is not None)
        if image is not None:
            session.pending = _Proposal(reply.number, image)
        return reply

    def _is_of_pushes(self, base: int) -> bool:
        """Tell whether everything counts as changed since ``base`` because of sparse pushes, and no restart."""
        log = self.model.changelog
        return log.began <= base < log.covered_from or (base >= log.covered_from and self.model.densified)

    def _from_image(self, image: torch.Tensor, base: int) -> Reply:
        """Send the largest differences from the image or, if the rule wants no more of that, all of them."""
        # An upper bound on the union is enough for the rule here, and costs nothing.
        most = most_changed(self.model.changelog.since(base), self.model.span.length)
        density = None if most is None else most / self.model.span.length
        make = self._topk if self._wants_topk(density, in_topk=True) and self._has_room(image) else self._closing
        pending = make(image, 1.0 if density is None else density)
        if pending is None:
            self.session.drop_image()
            return self._exact(None)
        self.session.pending = pending
        return pending.reply

    def _wants_topk(self, changed_density: float | None, *, in_topk: bool) -> bool:
        rule, pushes_all = self.session.rule, self.request.pushes_all
        if self.model.mode.is_feed:  # whose words have no differences
            return False
        return rule.wants_topk(changed_density, in_topk, self.topk.limit, pushes_all=pushes_all)

    def _has_room(self, image: torch.Tensor) -> bool:
        """Tell whether an image has room for what this reply keeps until it is acknowledged, or find that room."""
        session = self.session
        if session.selection is not None and session.selection.settings == self.topk:
            return True
        session.selection = DifferenceSelection(self.topk)
        more = self._topk_entries() - session.room
        if more > 0:
            if not self.topk.memory.extend_image(image, _PENDING_ENTRY_BYTES * more):
                return False
            session.room += more
        return True

    def _topk(self, image: torch.Tensor, changed_density: float) -> _Pending:
        model, session = self.model, self.session
        # Beside the apply thread, so that pulls of several workers select at the same time. A concurrent push is sent
        # now or later; either way the image becomes what the worker has.
        selection = session.selection
        assert selection is not None
        self.reserve(selection.nbytes(model))
        selected = selection.select(model, image)
        taken, chunks, arrived = selected.taken, [], selected.taken.values
        if taken.offsets.numel():
            form, entries = self.topk.form(self.form), SparseSlice(model.span, *taken)
            if self.topk.density >= 1:
                self.reserve(12 * model.span.length)
                entries = entries.everywhere()  # places cost more than zeros do
                taken = SelectedEntries(
                    torch.arange(model.span.length, dtype=torch.int64, device=entries.values.device), entries.values
                )
            encoded = list(frames.encode(entries, form, chunk_bytes=self.topk.chunk_bytes))
            arrived = torch.cat([piece.decoded for piece in encoded]).to(taken.values.device)
            chunks = [piece.chunk for piece in encoded]
        messages = ReplyMessages(chunks, self.form, self.topk.chunk_bytes)
        reply = self._reply(ReplyMode.TOPK, selected.version, arrived.numel(), messages, changed_density, image=True)
        selection.commit(selected, Sent(taken, arrived))  # nothing can fail any more: the reply is pending from here on
        return _Pending(reply, self.request.acknowledged, added=(taken.offsets, arrived))

    def _closing(self, image: torch.Tensor, changed_density: float) -> _Pending | None:
        """Send all differences from the image; ``None`` if the images have no room for a reply that is kept."""
        model = self.model
        exact = ExactReplies(model, self.apply_thread, self.topk.chunk_bytes, self.reserve)
        copy, slices = exact.copy(), list[SparseSlice]()
        for part in copy.parts(model.span):
            values = model.rounded(part.values, part.span)
            of_replica = image[part.span.start - model.span.start : part.span.end - model.span.start]
            differs = values.view(torch.int32) != of_replica.view(torch.int32)  # bits, so that −0 is not taken for +0
            offsets = differs.nonzero().view(-1)
            self.reserve(SPARSE_ENTRY_BYTES * offsets.numel())
            if offsets.numel():
                slices.append(SparseSlice(part.span, offsets, values[offsets]))
        count = sum(each.entries for each in slices)
        if not self.topk.memory.extend_image(image, _KEPT_ENTRY_BYTES * count):
            return None
        shared = exact.sparse(copy.position, copy.version, slices, self.form)
        return _Pending(
            self._reply(ReplyMode.EXACT, shared.version, shared.entries, shared.messages, changed_density),
            self.request.acknowledged,
        )

    def _reply(
        self,
        mode: ReplyMode,
        version: int,
        entries: int,
        messages: Messages,
        changed_density: float | None = None,
        *,
        image: bool = False,
    ) -> Reply:
        """Number a reply; an exact one has all that changed, so ``changed_density`` is then its own."""
        self.session.number += 1
        sent = entries / self.model.span.length
        changed = sent if changed_density is None else changed_density
        return Reply(mode, self.session.number, version, sent, changed, image, messages)

    def _topk_entries(self) -> int:
        """Count the entries of a top-k reply; a selector that takes about k may take a few more."""
        return sum(k for _, k in self.topk.entries(self.model.layout, self.model.span))
