"""The default: last step's threshold in one pass, corrected by the secant of the tail.

The threshold is known before the step, so one pass accumulates and takes. The count that the pass finds moves the
threshold for the next step, by the tail's own scale. If the count misses ``k`` by more than the tolerance, it is
corrected within the step: a surplus is put back (no pass over the memory), a lack costs counting passes and a second
take. The first step starts at the Laplace estimate (see :mod:`pscore.selection.research`). A small input, whose count
varies by chance, may miss ``k`` by more; it is ranked if it has no threshold.

The threshold does not follow the learning rate: when that falls, the entries near the threshold still consist of steps
at the old rate. The threshold drifts down as these are taken, and the drift is predicted.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pscore.selection.base import TOLERANCE, SelectorState, exact, keep_largest, take_all
from pscore.selection.host.segments import Integers, Passed, Reals
from pscore.selection.inputs import SelectionInput
from pscore.selection.kernels.base import Taken

_LEVEL_GAIN, _DRIFT_GAIN = 0.6, 0.3
_RISING = 0.9  # of a drift that is kept if it goes up
_RANKED_STEPS = 16
ROOM = 3  # capacity of the pass, as a multiple of k: a surplus up to there needs no other pass
_MOST_PASSES = 8
_UNTIL_ZERO = 3
_SMALL_SIZE = 1 << 14  # elements of an input whose count may be off by chance
_CHANCE = 1.5  # of such an input, in square roots of k
_LARGEST_SIZE = 1 << 18  # of a tensor whose threshold one thread searches
_RULE = ROOM, _SMALL_SIZE, _LARGEST_SIZE, _MOST_PASSES, _UNTIL_ZERO, _LEVEL_GAIN, _DRIFT_GAIN, _RISING
_LARGEST = float(np.finfo(np.float32).max)


def warm(inputs: SelectionInput, k: int, state: SelectorState) -> Taken:
    """Take ``k`` entries within the tolerance."""
    if k >= inputs.numel:
        return take_all(inputs)
    if "ranked" in state:
        return _rank(inputs, k, state, state["ranked"] - 1)
    threshold = state.get("threshold", math.inf)
    is_small = inputs.numel <= _SMALL_SIZE
    off = float(deviation(k, _CHANCE * is_small))
    search = TailSearch(k, off)
    if threshold == math.inf and is_small:
        return rank(inputs, k, state)
    if threshold == math.inf:
        first = laplace_threshold(inputs, k)
        if first == 0:
            return take_all(inputs)
        found = search.run(inputs, first)
        if found is None:
            return rank(inputs, k, state)
        threshold = found
    result = inputs.take(threshold, ROOM * k)
    lacks = result.count_above < k - off and threshold != 0  # at 0 there is no more to be had
    if lacks or result.count_above > ROOM * k:
        inputs.put_back(result.taken)
        search.update(threshold, result.count_above, result.sum_above)
        found = search.run(inputs)
        if found is None:
            return rank(inputs, k, state)
        threshold = found
        result = inputs.take(threshold, ROOM * k)
    _predict(state, threshold, result.count_above, result.sum_above, k)
    if result.count_above > k + off:
        return keep_largest(inputs, result.taken, k)
    return result.taken


def deviation(k: Any, chance: Any) -> Any:
    """Return by how many entries a count may miss ``k`` without a correction; of numbers or of arrays.

    That is the tolerance or, if it is more, ``chance`` times ``√k``, which a count varies by from step to step.
    """
    return np.maximum(TOLERANCE * k, np.minimum(chance * np.sqrt(k), k - 1))


class Corrected(NamedTuple):
    """The entries of all rows after :func:`correct`; ``counts`` are theirs by row, -1 of a row that is left."""

    offsets: Integers
    values: Reals
    counts: Integers


def correct(
    rows: NDArray[Any],
    sizes: Integers,
    wanted: Integers,
    base: int,
    memory: Reals,
    thresholds: NDArray[np.float64],
    drifts: NDArray[np.float64],
    passed: Passed,
    offsets: Integers,
) -> Corrected:
    """Do for all rows of a table what :func:`warm` does for one after its pass at the known threshold.

    A row is left, its entries in the memory, if its threshold is infinite, no threshold is found, or the tensor is too
    large for one thread to search: :func:`warm` begins anew then. A small one is ranked instead.

    Args:
        rows: as of :func:`~pscore.selection.host.segments.update`, which has taken entries with room for ``ROOM·k``.
        sizes: of the tensors.
        wanted: ``k`` of each row.
        base: from which entries are counted.
        memory: of all tensors, end to end; changed.
        thresholds: of each row, fp64; changed to that of the next step.
        drifts: of each row, fp64; changed likewise.
        passed: the result of the pass; its counts change.
        offsets: those of ``passed``, all written.
    """
    from pscore.selection.host import warm_loops

    searched, above, counts = rows["searched"], passed.above, passed.taken
    off = deviation(wanted, _CHANCE * (sizes <= _SMALL_SIZE))
    misses = np.isinf(thresholds) | (above > wanted + off) | ((above < wanted - off) & (thresholds != 0))
    moves = bool((misses & searched).any())
    size = int(np.maximum(counts, searched * (wanted + off + 2).astype(np.int64)).sum()) if moves else 0
    new_offsets, new_values = np.empty(size, np.int64), np.empty(size, np.float32)
    total = warm_loops.correct(
        rows, searched, sizes, wanted, off, base, memory, thresholds, drifts, above, passed.excess, counts, offsets,
        passed.values, new_offsets, new_values, moves, _RULE,
    )  # fmt: skip
    if not moves:
        return Corrected(offsets, passed.values, counts)
    return Corrected(new_offsets[:total], new_values[:total], counts)


def rank(inputs: SelectionInput, k: int, state: SelectorState) -> Taken:
    """Take the exact top-k if no threshold is found, of a large input in more steps to come, too."""
    return _rank(inputs, k, state, 0 if inputs.numel <= _SMALL_SIZE else _RANKED_STEPS)


def _rank(inputs: SelectionInput, k: int, state: SelectorState, steps: float) -> Taken:
    """Take the exact top-k, now and in ``steps`` more steps: without a threshold, ranking is cheaper than counting.

    After the last of them the threshold lies just below the smallest entry that was taken.
    """
    taken = exact(inputs, k, state)
    state.clear()
    if steps:
        state["ranked"] = steps
    else:
        values = taken.values.abs()
        below = torch.nextafter(values.min(), values.new_zeros(())) if values.numel() else math.inf
        state.update(threshold=float(below), drift=0.0)
    return taken


def _predict(state: SelectorState, threshold: float, count: int, excess: float, k: int) -> None:
    """Set the threshold of the next step: level and drift of the best threshold, smoothed (Holt's linear method).

    The best one of this step was ``t + β·ln(c/k)`` with ``β`` = mean excess. The drift matters for a while after the
    learning rate has dropped: each step then takes from a residual that grows more slowly than it is emptied. Upwards
    it is damped: while a residual fills, its threshold rises with the root of the steps, ever more slowly, and would be
    overshot.
    """
    if threshold == 0 and count <= k:
        state.update(threshold=0.0, drift=0.0)
        return
    best = max(threshold / 2, threshold + excess / count * math.log(count / k))
    expected = state.get("threshold", best)
    drift = state.get("drift", 0.0)
    drift *= _RISING if drift > 0 else 1.0
    level = expected + _LEVEL_GAIN * (best - expected)
    drift += _DRIFT_GAIN * (level - expected)
    state["drift"] = drift
    state["threshold"] = max(best / 2, level + drift)


def predict(
    used: NDArray[np.float64],
    expected: NDArray[np.float64],
    drifts: NDArray[np.float64],
    above: Integers,
    excess: NDArray[np.float64],
    wanted: Integers,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Do for many rows what :func:`warm` does for the next threshold; return thresholds and drifts, fp64.

    ``expected`` is the threshold that a row's state has: infinite if there is none.
    """
    scarce = (used == 0) & (above <= wanted)
    known = np.maximum(above, 1)
    excess = np.where(np.isfinite(excess), excess, 0.0)  # a sum may leave fp32 though its terms do not
    best = np.maximum(used / 2, used + excess / known * np.log(known / wanted))
    expected = np.where(np.isinf(expected), best, expected)
    level = expected + _LEVEL_GAIN * (best - expected)
    drifts = drifts * np.where(drifts > 0, _RISING, 1.0) + _DRIFT_GAIN * (level - expected)
    return np.where(scarce, 0.0, np.maximum(best / 2, level + drifts)), np.where(scarce, 0.0, drifts)


def laplace_threshold(inputs: SelectionInput, k: int) -> float:
    """Return ``b·ln(n/k)``, at most the largest magnitude: the threshold of Laplace magnitudes with their mean ``b``.

    ``k < n``; 0 only if every number is 0.
    """
    mean, largest = inputs.magnitude()
    return min(largest, mean * math.log(inputs.numel / k))


@dataclass(slots=True)
class TailSearch:
    """Finds a threshold above which ``k`` entries lie, by the secant of the count's logarithm.

    Counts fall exponentially in the tail. With ``c`` entries above ``t`` and ``s`` the sum of their excess, the tail's
    scale is ``β = s/c`` at first, then ``β = (t − t′)/ln(c′/c)`` between two passes, and the next threshold
    ``t + β·ln(c/k)``. If that leaves the known bracket, the bracket is halved, geometrically: magnitudes may span
    sixty orders. ``count`` entries lie above the last ``threshold`` tried; ``off`` of them too many or too few will do.
    """

    k: int
    off: float
    threshold: float = 0.0
    count: int = -1
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
        if count > self.k:
            self._low = max(self._low, threshold)
        elif count < self.k:
            self._high = min(self._high, threshold)

    def run(self, inputs: SelectionInput, first: float | None = None) -> float | None:
        """Return a threshold, searched from ``first`` or, for ``None``, from the last pass.

        The threshold is 0 if no more than ``k`` entries are not zero, and ``None`` if the passes did not suffice:
        equal magnitudes lie on both sides of ``k``, or a few are out of all proportion to the rest.
        """
        if first is not None:
            self.update(first, *inputs.count_above(first))
        if math.isinf(self._high) and self.count > self.k:
            self._high = inputs.magnitude()[1]
        tried = 0
        while abs(self.count - self.k) > self.off:
            tried += 1
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
