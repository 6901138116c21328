"""The array that dense updates are written to."""

import weakref

import numpy as np

from pscore.model.layout import Span
from pscore.selection.rule import Reals


class WholeBuffer:
    """One fp32 array ``[size]`` that is used again and again: fresh memory of a model's size costs a pass of its own.

    A part to which a push still refers is never given out a second time; its span gets fresh memory then.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._array: Reals | None = None
        self._lent: list[tuple[Span, weakref.ref[Reals]]] = []

    def of(self, span: Span) -> Reals:
        """Return the memory of a span of the layout, with any content."""
        if self._array is None:
            self._array = np.empty(self._size, np.float32)
        self._lent = [lent for lent in self._lent if lent[1]() is not None]
        if any(each.intersect(span).length for each, _ in self._lent):
            return np.empty(span.length, np.float32)
        part = self._array[span.start : span.end]
        self._lent.append((span, weakref.ref(part)))
        return part
