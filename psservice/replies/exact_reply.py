"""Exact replies: the values of everything that changed since a version, read beside the apply thread.

While the values are read, pushes may change some of them. Each such push is in the change log by the time that the
apply thread is asked for the version: there only what these pushes changed is read once more, and takes the place of
what was read before. If nothing has changed, the apply thread is not asked. So the reply is the model at that version,
bit for bit, and the apply thread is hardly held up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice, entries
from pscore.wire.frames import WireForm
from psservice.model.changelog import gather, most_changed
from psservice.model.parameters import ModelShard
from psservice.replies import reply_loops
from psservice.replies.shared_reply import DenseMessages, Messages, ReplyMessages, SharedReply
from psservice.rules.changed import ChangedIndices

Result = TypeVar("Result")

Reserve = Callable[[int], None]
"""Charges bytes before they are occupied; raises :class:`Rejected` (``BUSY``) if they may not be."""

Entries = tuple[torch.Tensor, torch.Tensor]
"""Offsets (int64 ``[k]``, ascending) and their fp32 values."""

_NOTHING: Entries = torch.empty(0, dtype=torch.int64, device="cpu"), torch.empty(0, dtype=torch.float32, device="cpu")

SPARSE_ENTRY_BYTES = 24
"""Of an answer while it is made: int64 offset, fp32 value, and as they are written."""

_DENSE_BYTES = 8  # an element of everything: the copy, and as it is written


class ParameterThread(Protocol):
    """The thread that owns the parameters."""

    def run(self, job: Callable[[], Result]) -> Result:
        """Run a job on that thread; raises :class:`Rejected` (``BUSY``)."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A copy of all values (fp32 ``[span.length]``) at ``version``; ``position`` is of the change log."""

    position: int
    version: int
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExactReplies:
    """Makes the exact replies of a model, in chunks of ``chunk_bytes``."""

    model: ModelShard
    apply_thread: ParameterThread
    chunk_bytes: int
    reserve: Reserve

    def since(self, base: int | None, had: Span, form: WireForm) -> SharedReply:
        """Return the changes since ``base`` in the range that the worker has (``had``), and all values after it.

        Workers that ask for the same share the reply, and the one that makes it reserves its bytes. Raises
        :class:`Rejected` (``BUSY``, ``NON_FINITE``).
        """
        model = self.model
        before, position = model.changes, model.changelog.appended
        changes = None if base is None else model.changelog.since(base)
        base = None if changes is None else base  # everything is sent, whatever the base is

        def make() -> SharedReply:
            self.reserve(exact_bytes(changes if had.end == model.span.end else None, model.span.length))
            found = None if changes is None or had.end < model.span.end else gather(changes, model.theta)
            if found is None:
                return self.of(self.whole(), base, had, form)
            now, version, late = self._late(before, position)
            if late is None:  # everything has changed meanwhile
                return self.of(self.whole(), base, had, form)
            return self.reply(now, version, [SparseSlice(model.span, *_merged(found, late))], form)

        return model.replies.get((base, had.end, form), position, make)

    def whole(self) -> Whole:
        """Copy all values at one version."""
        before, position = self.model.changes, self.model.changelog.appended
        values = self.model.theta.clone()
        now, version, late = self._late(before, position, values)
        if late is not None and late[0].numel():
            values[late[0]] = late[1]
        return Whole(now, version, values)

    def of(self, whole: Whole, base: int | None, had: Span, form: WireForm) -> SharedReply:
        """Build the reply from ``whole`` instead of the live parameters; never shared."""
        model, values = self.model, whole.values
        changes = None if base is None else model.changelog.since(base)  # later ones too: the copy's values are sent
        found = None if changes is None else gather(changes, values)
        if found is None:
            return self.reply(whole.position, whole.version, [SparseSlice(model.span, None, values)], form)
        inside = SparseSlice(model.span, *found).clip(had)
        rest = SparseSlice(model.span, None, values).clip(Span(had.end, model.span.end))
        return self.reply(whole.position, whole.version, [each for each in (inside, rest) if each is not None], form)

    def _late(
        self, before: int, position: int, everything: torch.Tensor | None = None
    ) -> tuple[int, int, Entries | None]:
        """Return position and version now, and the values that changed after a position, on the apply thread.

        ``before``: ``model.changes`` before the first value was read. If everything changed, the result has ``None``,
        and ``everything`` is filled in instead.
        """
        model = self.model
        version = model.version
        if before % 2 == 0 and model.changes == before:
            return position, version, _NOTHING

        def read() -> tuple[int, int, Entries | None]:
            changes = model.changelog.after(position)
            if not changes and changes is not None:
                return position, model.version, _NOTHING
            late = None
            if changes is not None:
                most = most_changed(changes, model.span.length)
                self.reserve(SPARSE_ENTRY_BYTES * (most or 0))
                late = gather(changes, model.theta)
            if late is None and everything is not None:
                everything.copy_(model.theta)
            return model.changelog.appended, model.version, late

        return self.apply_thread.run(read)

    def reply(self, position: int, version: int, slices: list[SparseSlice], form: WireForm) -> SharedReply:
        """Return a reply of entries at a version, which is not shared."""
        # Cut and rounded on the host: a device would be waited for at each cut.
        segments = [segment for each in slices for segment in self.model.as_sent(each.cpu())]
        sent = entries(segments)
        is_dense = any(each.offsets is None and each.span == self.model.span for each in slices)
        nbytes = sum(4 * each.entries if each.offsets is None else 12 * each.entries for each in slices)
        messages: Messages
        if all(each.offsets is None for each in segments):
            messages = DenseMessages(segments, form, self.chunk_bytes)
        else:
            messages = ReplyMessages(segments, form, self.chunk_bytes, 2 * nbytes)
        return SharedReply(position, version, sent, is_dense, nbytes, messages)


def exact_bytes(changes: Sequence[ChangedIndices] | None, size: int) -> int:
    """Return the most bytes of an exact answer over these changes."""
    most = most_changed(changes, size)
    return _DENSE_BYTES * size if most is None else SPARSE_ENTRY_BYTES * most


def _merged(found: Entries, late: Entries) -> Entries:
    """Merge entries; those that were read late count if both have one."""
    if not late[0].numel():
        return found
    if late[0].is_cpu:
        size = found[0].numel() + late[0].numel()
        all_offsets, all_values = np.empty(size, np.int64), np.empty(size, np.float32)
        before, after = [each.numpy() for each in found], [each.numpy() for each in late]
        count = reply_loops.merge.on(size)(before[0], before[1], after[0], after[1], all_offsets, all_values)
        return torch.from_numpy(all_offsets[:count]), torch.from_numpy(all_values[:count])
    offsets = torch.unique(torch.cat([found[0], late[0]]))
    values = offsets.new_empty(offsets.numel(), dtype=torch.float32)
    for some_offsets, some_values in (found, late):
        values[torch.searchsorted(offsets, some_offsets)] = some_values
    return offsets, values
