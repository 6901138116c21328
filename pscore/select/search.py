"""Searching a threshold above which about ``k`` entries lie, by counting passes."""

import math
from dataclasses import dataclass

import numpy as np

from pscore.select.base import TOLERANCE
from pscore.select.inputs import SelectionInput

_MOST_PASSES = 8
_UNTIL_ZERO = 3
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(slots=True)
class TailSearch:
    """Finds a threshold by the secant of the logarithm of the count: counts fall exponentially in the tail.

    With ``c`` entries above ``t`` and ``s`` the sum of their excess, the tail's scale is ``β = s/c`` at first, then
    ``β = (t − t′)/ln(c′/c)`` between two passes, and the next threshold ``t + β·ln(c/k)``. Where that leaves the known
    bracket, the bracket is halved, geometrically: magnitudes may span sixty orders.

    Attributes:
        k: entries that should lie above.
        threshold: the last one tried.
        count: entries above that.
        passes: counting passes so far.
    """

    k: int
    threshold: float = 0.0
    count: int = -1
    passes: int = 0
    _low: float = 0.0
    _high: float = math.inf
    _scale: float = 0.0
    _plunge: int = 1

    def update(self, threshold: float, count: int, excess: float) -> None:
        """Account for a counting pass."""
        if self.count > 0 and count > 0 and count != self.count and threshold != self.threshold:
            self._scale = (threshold - self.threshold) / math.log(self.count / count)
        elif count > 0:
            self._scale = excess / count
        self.threshold, self.count = threshold, count
        self.passes += 1
        if count > self.k:
            self._low = max(self._low, threshold)
        elif count < self.k:
            self._high = min(self._high, threshold)

    @property
    def close(self) -> bool:
        """True where the last count is within the tolerance."""
        return abs(self.count - self.k) <= TOLERANCE * self.k

    def run(self, inputs: SelectionInput, first: float | None = None) -> float | None:
        """Return a threshold, searched from ``first`` or, for ``None``, from the last pass.

        Returns:
            0 where no more than ``k`` entries are not zero. ``None`` where the passes did not suffice: equal magnitudes
            lie on both sides of ``k``, or a few are out of all proportion to the rest.
        """
        if first is not None:
            self.update(first, *inputs.count_above(first))
        if math.isinf(self._high) and self.count > self.k:
            self._high = inputs.magnitude()[1]
        started = self.passes
        while not self.close:
            tried = self.passes - started + 1
            following = self._next()
            if tried == _UNTIL_ZERO and self._low == 0:
                following = 0.0  # still too few: perhaps there are no more that are not zero
            elif tried > _MOST_PASSES or not self._low < following < self._high:
                return None
            self.update(following, *inputs.count_above(following))
            if following == 0 and self.count <= self.k:
                return 0.0
        return self.threshold

    def _next(self) -> float:
        """Return the next threshold, in fp32 as the kernels compare."""
        if self.count > 0 and self._scale > 0:
            following = _single(self.threshold + self._scale * math.log(self.count / self.k))
            if self._low < following < self._high:
                return following
        if math.isinf(self._high):
            return _single(2 * self.threshold)
        if self._low > 0:
            return _single(math.sqrt(self._low) * math.sqrt(self._high))
        self._plunge *= 2  # nothing is known below: fall faster and faster
        return _single(self._high * 2.0 ** (-self._plunge / 2))


def _single(x: float) -> float:
    return float(np.float32(min(x, _LARGEST)))


def laplace_threshold(mean: float, numel: int, k: int) -> float:
    """Return ``b·ln(n/k)``: the threshold where magnitudes are Laplace distributed with scale ``b``, their mean."""
    return mean * math.log(numel / k)
