"""Searching a threshold above which about ``k`` entries lie, by counting passes."""

import math
from dataclasses import dataclass, field

from pscore.selectors.base import TOLERANCE
from pscore.sources import Source

_MOST_PASSES = 30
_UNTIL_ZERO = 3


@dataclass(slots=True)
class TailSearch:
    """Finds a threshold by the secant of the logarithm of the count: magnitudes thin out exponentially in the tail.

    With ``c`` entries above ``t`` and ``s`` the sum of their excess, the tail's scale is ``β = s/c`` at first, then
    ``β = (t − t′)/ln(c′/c)`` between two passes, and the next threshold ``t + β·ln(c/k)``; where that leaves the
    bracket of what is known, the bracket is halved.

    Attributes:
        k: how many entries should lie above.
        threshold: the last one tried.
        count: how many lie above it.
        passes: counting passes so far.
    """

    k: int
    threshold: float = 0.0
    count: int = -1
    passes: int = 0
    _low: float = 0.0
    _high: float = math.inf
    _previous: tuple[float, int] | None = field(default=None)
    _scale: float = 0.0

    def saw(self, threshold: float, count: int, excess: float) -> None:
        """Take a pass into account."""
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

    @property
    def exhausted(self) -> bool:
        """True where no further pass can help: equal magnitudes lie on both sides of ``k``."""
        return self.passes >= _MOST_PASSES or not self._low < self._next() < self._high

    def run(self, source: Source, first: float | None = None) -> float:
        """Search from ``first`` (``None``: from what was seen) and return a threshold.

        Ties may leave it far off; where no more than ``k`` entries are not zero it is 0.
        """
        if first is not None:
            self.saw(first, *source.tail(first))
        if math.isinf(self._high) and self.count > self.k:
            self._high = source.magnitude()[1]
        tried = 0
        while not self.close and not self.exhausted:
            tried += 1
            # Two passes on, and still too few: perhaps there are no more that are not zero.
            following = 0.0 if tried == _UNTIL_ZERO and self._low == 0 else self._next()
            self.saw(following, *source.tail(following))
            if following == 0 and self.count <= self.k:
                return 0.0
        return self.threshold if self.close else self._low

    def _next(self) -> float:
        if self.count > 0 and self._scale > 0:
            following = self.threshold + self._scale * math.log(self.count / self.k)
            if self._low < following < self._high:
                return following
        return (self._low + self._high) / 2 if math.isfinite(self._high) else 2 * self.threshold


def laplace_threshold(mean: float, numel: int, k: int) -> float:
    """Return ``b·ln(n/k)``: the threshold where magnitudes are Laplace distributed with scale ``b``, their mean."""
    return mean * math.log(numel / k)
