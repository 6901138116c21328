"""Copies of tensors at one version, of which nothing is copied but what updates overwrite.

Whoever changes a tensor names the elements first. While a copy is open, the values that these have are kept, each
element's once. A copy takes an element's value from what was kept since the copy was opened, else from the tensor.
Several copies share what is kept: a newer copy's values are an older one's too, if the older one has none.
"""

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from psservice.model import union_loops
from psservice.rules.changed import offset_dtype

_SMALL = 4096
"""Elements up to which a tensor is copied at once: counters, and what is less work to copy than to watch."""


class TensorCopy(Protocol):
    """A tensor's values at one version; read from any thread. :meth:`close` must follow."""

    @property
    def dtype(self) -> torch.dtype: ...  # noqa: D102

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102

    def read(self, start: int, end: int) -> torch.Tensor:
        """Return the elements ``[start, end)`` of the flat tensor, in memory of their own."""

    def gather(self, offsets: torch.Tensor) -> torch.Tensor:
        """Return the elements at offsets (int64, ascending) of the flat tensor."""

    def release(self, end: int) -> None:
        """Note that no element before ``end`` is read any more."""

    def close(self) -> None:
        """Keep nothing for this copy any more."""


@dataclass(slots=True, eq=False)
class _Kept:
    """The values that were overwritten from the opening of some copies until the opening of the next ones."""

    readers: int = 0
    marks: NDArray[np.uint64] | torch.Tensor | None = None  # of each kept element a bit, on a device a bool
    entries: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # ascending offsets, values
    rest: tuple[int, torch.Tensor] | None = None  # every element from an offset on; counts where no entry does
    kept_bytes: int = 0  # of entries and rest

    @property
    def nbytes(self) -> int:
        return self.kept_bytes + (0 if (marks := self.marks) is None else marks.nbytes)

    def add(self, entries: list[tuple[torch.Tensor, torch.Tensor]], rest: tuple[int, torch.Tensor] | None) -> None:
        """Keep more; readers that are under way see all of it, or none.

        What is there counts before the new rest, and so do the new entries.
        """
        self.entries = [*self.entries, *entries]
        self.kept_bytes += sum(each.nbytes for pair in entries for each in pair)
        if rest is not None and self.rest is None:
            self.rest = rest
            self.kept_bytes += rest[1].nbytes

    def write_into(self, values: torch.Tensor, start: int) -> None:
        """Overwrite what was read from a tensor from ``start`` on with what is kept of that."""
        end = start + values.numel()
        if self.rest is not None and end > self.rest[0]:
            first, rest = self.rest
            begin = max(first, start)
            values[begin - start :] = rest[begin - first : end - first]
        for offsets, kept in list(self.entries):
            first, last = torch.searchsorted(offsets, offsets.new_tensor([start, end])).tolist()
            if first < last:
                values[offsets[first:last].long() - start] = kept[first:last]

    def write_at(self, values: torch.Tensor, offsets: torch.Tensor) -> None:
        """Overwrite what was read from a tensor at offsets (ascending) with what is kept of that."""
        if self.rest is not None:
            first, rest = self.rest
            inside = offsets >= first
            values[inside] = rest[offsets[inside] - first]
        for kept_offsets, kept in list(self.entries):
            if values.is_cpu:
                loop = union_loops.overwrite.on(kept.numel())
                loop(offsets.numpy(), values.numpy(), kept_offsets.numpy(), kept.numpy())
            elif offsets.numel():
                places = torch.searchsorted(offsets, kept_offsets.long()).clamp_(max=offsets.numel() - 1)
                found = offsets[places] == kept_offsets
                values[places[found]] = kept[found]


class _Watched:
    """A tensor of which copies are open; ``kept`` has the oldest values first."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.flat = tensor.detach().view(-1)
        self.kept: list[_Kept] = []
        self.copies: set[_OpenCopy] = set()

    def keep_new(self, kept: _Kept, offsets: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Mark elements, and return the offsets from ``first`` on that had no mark, and the values there."""
        new = self._mark(kept, offsets, first)
        return new, values_at(self.flat, new)

    def merge(self) -> None:
        """Join each inner part of the kept values, if no copy begins at it, to the part before it."""
        for place in range(len(self.kept) - 2, 0, -1):
            before, kept = self.kept[place - 1], self.kept[place]
            if kept.readers:
                continue
            if before.rest is None:  # else that has every element which copies before still read
                if before.marks is None:
                    for offsets, _ in before.entries:
                        self._mark(before, offsets, 0)
                lacking = []
                for offsets, values in kept.entries:
                    new = self._mark(before, offsets, 0)
                    lacking.append((new, values[torch.searchsorted(offsets, new)]))
                before.add([pair for pair in lacking if pair[0].numel()], kept.rest)
            del self.kept[place]

    def _mark(self, kept: _Kept, offsets: torch.Tensor, first: int) -> torch.Tensor:
        """Mark elements, and return the offsets from ``first`` on that had no mark."""
        size = self.flat.numel()
        if not self.flat.is_cpu:
            if kept.marks is None:
                kept.marks = torch.zeros(size, dtype=torch.bool, device=self.flat.device)
            assert isinstance(kept.marks, torch.Tensor)
            new = offsets[~kept.marks[offsets] & (offsets >= first)]
            kept.marks[new] = True
            return new.to(offset_dtype(size))
        if kept.marks is None:
            kept.marks = np.zeros(-(-size // 64), np.uint64)
        found = torch.empty(offsets.numel(), dtype=offset_dtype(size), device="cpu")
        loop = union_loops.mark_new.on(offsets.numel())
        return found[: loop(kept.marks, offsets.long().numpy(), first, found.numpy())].clone()


def values_at(flat: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the elements of a flat tensor at offsets, in this thread."""
    if not flat.is_cpu:
        return flat[offsets]
    values = torch.empty(offsets.numel(), dtype=flat.dtype, device="cpu")
    union_loops.take.on(offsets.numel())(flat.numpy(), offsets.numpy(), values.numpy())
    return values


class CopyOnWrite:
    """The open copies of a model's tensors. Changes are announced, and copies opened, on the apply thread alone."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self._lock = threading.RLock()  # garbage collection may close a copy under the lock

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for open copies."""
        with self._lock:
            return sum([kept.nbytes for watched in [*self._watched.values()] for kept in [*watched.kept]])

    @property
    def held_bytes(self) -> int:
        """Bytes that open copies keep alive once nothing else has the tensors: these, and what is kept for copies."""
        with self._lock:
            return self.nbytes + sum([watched.tensor.nbytes for watched in [*self._watched.values()]])

    @property
    def is_open(self) -> bool:
        """Whether a copy is open."""
        return bool(self._watched)

    def overwrites(self, tensor: torch.Tensor, offsets: torch.Tensor | None) -> None:
        """Keep what open copies need of a tensor before elements change: those at ``offsets``, ascending, or all."""
        if not self._watched or (watched := self._watched.get(id(tensor))) is None:
            return
        with self._lock:
            if not watched.copies:  # closed meanwhile
                return
            kept, first = watched.kept[-1], min(copy.position for copy in [*watched.copies])
        if kept.rest is not None:
            return
        if offsets is None:
            rest = first, watched.flat[first:].clone()
            with self._lock:
                kept.add([], rest)
        else:
            entries = watched.keep_new(kept, offsets, first)
            if not entries[0].numel():
                return
            with self._lock:
                kept.add([entries], None)

    def open(self, tensor: torch.Tensor) -> TensorCopy:
        """Open a copy of a tensor as it is."""
        if tensor.numel() <= _SMALL or not tensor.is_contiguous():
            return _Whole(tensor.detach().clone())
        with self._lock:
            watched = self._watched.setdefault(id(tensor), _Watched(tensor))
            if not watched.kept or watched.kept[-1].entries or watched.kept[-1].rest is not None:
                for sealed in watched.kept[-1:]:
                    sealed.marks = None  # nothing is added to it any more
                watched.kept.append(_Kept())
                watched.merge()
            copy = _OpenCopy(self, watched, watched.kept[-1])
            copy.kept.readers += 1
            watched.copies.add(copy)
            return copy

    def open_all(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorCopy]:
        """Open copies of tensors, by name."""
        return {name: self.open(tensor) for name, tensor in tensors.items()}

    def kept_since(self, copy: "_OpenCopy") -> list[_Kept]:
        """Return what was kept since a copy was opened, the oldest first."""
        with self._lock:
            kept = copy.watched.kept
            return kept[kept.index(copy.kept) :]

    def close(self, copy: "_OpenCopy") -> None:
        """Drop a copy, and what no other needs."""
        with self._lock:
            watched = copy.watched
            if copy not in watched.copies:
                return
            watched.copies.remove(copy)
            copy.kept.readers -= 1
            while watched.kept and not watched.kept[0].readers:
                watched.kept.pop(0)
            watched.merge()
            if not watched.copies:
                with suppress(KeyError):
                    del self._watched[id(watched.tensor)]


class _OpenCopy:
    """A copy of a tensor that updates may change meanwhile."""

    def __init__(self, owner: CopyOnWrite, watched: _Watched, kept: _Kept) -> None:
        self._owner, self.watched, self.kept = owner, watched, kept
        self.position = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.watched.flat.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.watched.tensor.shape)

    def read(self, start: int, end: int) -> torch.Tensor:
        values = self.watched.flat[start:end].clone()  # updates may change these, but keep what they were first
        for kept in reversed(self._owner.kept_since(self)):
            kept.write_into(values, start)
        return values

    def gather(self, offsets: torch.Tensor) -> torch.Tensor:
        values = values_at(self.watched.flat, offsets)
        for kept in reversed(self._owner.kept_since(self)):
            kept.write_at(values, offsets)
        return values

    def release(self, end: int) -> None:
        self.position = max(self.position, end)

    def close(self) -> None:
        self._owner.close(self)


class _Whole:
    """A copy that was made at once."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @property
    def dtype(self) -> torch.dtype:
        return self._tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape)

    def read(self, start: int, end: int) -> torch.Tensor:
        return self._tensor.reshape(-1)[start:end].clone()

    def gather(self, offsets: torch.Tensor) -> torch.Tensor:
        return self._tensor.reshape(-1)[offsets]

    def release(self, end: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Mean:
    """See :func:`mean_of`."""

    def __init__(self, copies: list[TensorCopy]) -> None:
        self._copies = copies

    @property
    def dtype(self) -> torch.dtype:
        return self._copies[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._copies[0].shape

    def read(self, start: int, end: int) -> torch.Tensor:
        total = self._copies[0].read(start, end)
        for copy in self._copies[1:]:
            total.add_(copy.read(start, end))
        return total.div_(len(self._copies))

    def gather(self, offsets: torch.Tensor) -> torch.Tensor:
        total = self._copies[0].gather(offsets)
        for copy in self._copies[1:]:
            total.add_(copy.gather(offsets))
        return total.div_(len(self._copies))

    def release(self, end: int) -> None:
        for copy in self._copies:
            copy.release(end)

    def close(self) -> None:
        for copy in self._copies:
            copy.close()


def mean_of(copies: list[TensorCopy]) -> TensorCopy:
    """Return the mean of copies of equal shape, computed element by element in their order; it closes them."""
    return _Mean(copies)
