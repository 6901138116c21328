"""Sets of positions as sorted ranges, such as the samples of an epoch that a worker has leased."""

from collections.abc import Iterable, Iterator
from itertools import chain


class Ranges:
    """An immutable set of integers, as half-open ranges that are ascending, disjoint and not adjacent.

    Args:
        pairs: ``(start, end)`` of ranges in any order, which may overlap or be empty.
    """

    __slots__ = ("pairs",)

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        joined: list[tuple[int, int]] = []
        for start, end in sorted(pairs):
            if start >= end:
                continue
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(joined[-1][1], end))
            else:
                joined.append((start, end))
        self.pairs = tuple(joined)

    @property
    def total(self) -> int:
        """Number of integers."""
        return sum(end - start for start, end in self.pairs)

    def first(self, count: int) -> "Ranges":
        """Return the ``count`` lowest integers, or all if there are fewer."""
        found = []
        for start, end in self.pairs:
            if count <= 0:
                break
            found.append((start, min(end, start + count)))
            count -= end - start
        return Ranges(found)

    def __or__(self, other: "Ranges") -> "Ranges":
        return Ranges((*self.pairs, *other.pairs))

    def __and__(self, other: "Ranges") -> "Ranges":
        found, mine, theirs = [], 0, 0
        while mine < len(self.pairs) and theirs < len(other.pairs):
            (start, end), (other_start, other_end) = self.pairs[mine], other.pairs[theirs]
            found.append((max(start, other_start), min(end, other_end)))
            if end <= other_end:
                mine += 1
            else:
                theirs += 1
        return Ranges(found)

    def __sub__(self, other: "Ranges") -> "Ranges":
        if not self.pairs:
            return self
        edges = [self.pairs[0][0], *chain.from_iterable(other.pairs), self.pairs[-1][1]]
        return self & Ranges(zip(edges[::2], edges[1::2], strict=True))  # the gaps of the other

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and self.pairs == other.pairs

    def __hash__(self) -> int:
        return hash(self.pairs)

    def __repr__(self) -> str:
        return f"Ranges({list(self.pairs)})"
