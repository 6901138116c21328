"""One place for the dense segments of a message stream: values are in memory once, and those of one chunk twice."""

from collections.abc import Callable, Sequence

import torch

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice, entries, merge

_LEAST = 1 << 10  # entries of a segment that is moved as it comes: two pages are less than a chunk is charged for


class DensePlace:
    """Moves dense segments of a span to where they belong, each as it comes.

    ``make`` is called once, with the first one; it returns memory of the span on the host, with any content, of the
    values' dtype, or ``None`` if there is none. Segments stay where they are then.
    """

    def __init__(self, span: Span, make: Callable[[], torch.Tensor | None]) -> None:
        self._span, self._make = span, make
        self._values: torch.Tensor | None = None
        self._is_made = False

    def moved(self, segment: SparseSlice) -> SparseSlice:
        """Return a segment, with its values in their place if it is dense and not small."""
        if segment.offsets is not None or segment.entries < _LEAST:
            return segment
        if not self._is_made:
            self._values, self._is_made = self._make(), True
        return segment if self._values is None else self._move(self._values, segment)

    def joined(self, segments: Sequence[SparseSlice]) -> SparseSlice | None:
        """Join all segments, ascending, of which those that are not small were :meth:`moved`; ``None`` without one."""
        is_whole = all(each.offsets is None for each in segments) and entries(segments) == self._span.length
        if self._values is None or not is_whole:
            return merge(self._span, segments)
        for each in segments:
            if each.entries < _LEAST:
                self._move(self._values, each)
        return SparseSlice(self._span, None, self._values)

    def _move(self, values: torch.Tensor, segment: SparseSlice) -> SparseSlice:
        first = segment.span.start - self._span.start
        place = values[first : first + segment.entries]
        place.numpy()[:] = segment.values.numpy()  # numpy stays on this thread
        return SparseSlice(segment.span, None, place)
