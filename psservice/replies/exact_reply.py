"""Exact replies: the values of everything that changed since a version, read beside the apply thread.

While the values of a sparse reply are read, pushes may change some of them. Each such push is in the change log by the
time that the apply thread is asked for the version: there only what these pushes changed is read once more, and takes
the place of what was read before. If nothing has changed, the apply thread is not asked. A dense reply is read from a
copy of the model (:mod:`psservice.model.copies`) while it is sent. So the reply is the model at that version, bit for
bit, and the apply thread is hardly held up.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice, entries
from pscore.wire.dense import cut
from pscore.wire.frames import WireForm
from psservice.model.changelog import gather, most_changed, union
from psservice.model.copies import TensorCopy
from psservice.model.parameters import ModelShard
from psservice.replies import reply_loops
from psservice.replies.shared_reply import DenseMessages, ReplyMessages, SharedReply

Result = TypeVar("Result")

Reserve = Callable[[int], None]
"""Charges bytes before they are occupied; raises :class:`Rejected` (``BUSY``) if they may not be."""

Entries = tuple[torch.Tensor, torch.Tensor]
"""Offsets (int64 ``[k]``, ascending) and their values: fp32, or words of a feed."""

SPARSE_ENTRY_BYTES = 24
"""Of an answer while it is made: int64 offset, fp32 value, and as they are written."""

_PART_ELEMENTS = 1 << 18


class ParameterThread(Protocol):
    """The thread that owns the parameters."""

    def run(self, job: Callable[[], Result]) -> Result:
        """Run a job on that thread; raises :class:`Rejected` (``BUSY``)."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class ModelValues:
    """A model's values at ``version``, copied as long as somebody has this; ``position`` is the change log's then."""

    model: ModelShard
    position: int
    version: int
    values: TensorCopy

    @classmethod
    def opened(cls, model: ModelShard, position: int, version: int, values: TensorCopy) -> "ModelValues":
        """Return an open copy, which is closed when nobody has it any more."""
        found = cls(model, position, version, values)
        weakref.finalize(found, values.close).atexit = False
        return found

    def read(self, part: Span) -> torch.Tensor:
        """Return the values of a part, fp32 ``[part.length]``."""
        start = self.model.span.start
        return self.values.read(part.start - start, part.end - start)

    def parts(self, span: Span) -> Iterator[SparseSlice]:
        """Read a part of the model piece by piece."""
        for part in cut(span, _PART_ELEMENTS):
            yield SparseSlice(part, None, self.read(part))


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
        model, position = self.model, self.model.changelog.appended
        if base is not None and model.changelog.since(base) is None:
            base = None  # everything is sent, whatever the base is

        def make() -> SharedReply:
            found = None if base is None or had.end < model.span.end else self.read(base)
            if found is None:
                return self.of(self.copy(), base, had, form)
            now, version, changed = found
            return self.sparse(now, version, [SparseSlice(model.span, *changed)], form)

        return model.replies.get((base, had.end, form), position, make)

    def read(self, base: int) -> tuple[int, int, Entries] | None:
        """Read what has changed since a version; return position and version, and the entries then.

        ``None`` if everything has changed, or it is not known what. Raises :class:`Rejected` (``BUSY``).
        """
        model = self.model
        before, position = model.changes, model.changelog.appended
        changes = model.changelog.since(base)
        most = most_changed(changes, model.span.length)
        if changes is None or most is None:
            return None
        self.reserve(SPARSE_ENTRY_BYTES * most)
        found = gather(changes, model.theta)
        late = None if found is None else self._late(before, position)
        if found is None or late is None:  # everything has changed meanwhile
            return None
        now, version, values = late
        return now, version, _merged(found, values)

    def copy(self) -> ModelValues:
        """Open a copy of all values."""
        model = self.model
        return self.apply_thread.run(
            lambda: ModelValues.opened(model, model.changelog.appended, model.version, model.open_values())
        )

    def of(self, copy: ModelValues, base: int | None, had: Span, form: WireForm) -> SharedReply:
        """Build the reply from a copy instead of the live parameters; never shared."""
        model = self.model
        changes = None if base is None else model.changelog.since(base)  # later ones too: the copy's values are sent
        changed = None if changes is None else union(changes, model.span.length)
        if changed is None:
            return self._dense(copy, form)
        offsets = changed.to(model.theta.device).long()
        inside = SparseSlice(model.span, offsets, copy.read(model.span)[offsets]).clip(had)
        rest = Span(had.end, model.span.end)
        slices = [] if inside is None else [inside]
        if rest.length:
            slices.append(SparseSlice(rest, None, copy.read(rest)))
        return self.sparse(copy.position, copy.version, slices, form)

    def _late(self, before: int, position: int) -> tuple[int, int, Entries] | None:
        """Return position and version now, and the values that changed after a position, on the apply thread.

        ``before``: ``model.changes`` before the first value was read. ``None`` if everything has changed.
        """
        model = self.model
        version = model.version
        if before % 2 == 0 and model.changes == before:
            return position, version, _nothing(model)

        def read() -> tuple[int, int, Entries] | None:
            changes = model.changelog.after(position)
            if changes is None or (most := most_changed(changes, model.span.length)) is None:
                return None
            if not changes:
                return position, model.version, _nothing(model)
            self.reserve(SPARSE_ENTRY_BYTES * most)
            late = gather(changes, model.theta)
            return None if late is None else (model.changelog.appended, model.version, late)

        return self.apply_thread.run(read)

    def _dense(self, copy: ModelValues, form: WireForm) -> SharedReply:
        model = self.model

        def segments() -> Iterator[SparseSlice]:
            for part in copy.parts(model.span):
                yield from model.as_sent(part.cpu())

        messages = DenseMessages(segments, form, self.chunk_bytes)
        return SharedReply(copy.position, copy.version, model.span.length, True, 0, messages)

    def sparse(self, position: int, version: int, slices: Sequence[SparseSlice], form: WireForm) -> SharedReply:
        """Return a reply of entries at a version, which is not shared."""
        # Cut and rounded on the host: a device would be waited for at each cut.
        segments = [segment for each in slices for segment in self.model.as_sent(each.cpu())]
        nbytes = sum(4 * each.entries if each.offsets is None else 12 * each.entries for each in slices)
        messages = ReplyMessages(segments, form, self.chunk_bytes, 2 * nbytes)
        return SharedReply(position, version, entries(segments), False, nbytes, messages)


def _nothing(model: ModelShard) -> Entries:
    return torch.empty(0, dtype=torch.int64, device="cpu"), torch.empty(0, dtype=model.theta.dtype, device="cpu")


def _merged(found: Entries, late: Entries) -> Entries:
    """Merge entries; those that were read late count if both have one."""
    if not late[0].numel():
        return found
    if late[0].is_cpu:
        size = found[0].numel() + late[0].numel()
        all_offsets, all_values = np.empty(size, np.int64), np.empty(size, found[1].numpy().dtype)
        before, after = [each.numpy() for each in found], [each.numpy() for each in late]
        count = reply_loops.merge.on(size)(before[0], before[1], after[0], after[1], all_offsets, all_values)
        return torch.from_numpy(all_offsets[:count]), torch.from_numpy(all_values[:count])
    offsets = torch.unique(torch.cat([found[0], late[0]]))
    values = offsets.new_empty(offsets.numel(), dtype=found[1].dtype)
    for some_offsets, some_values in (found, late):
        values[torch.searchsorted(offsets, some_offsets)] = some_values
    return offsets, values
