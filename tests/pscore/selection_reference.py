"""The rule of selection and the recurrence in plain numpy, for one tensor at a time: what the product is compared with.

Every product and every sum is rounded by itself, as in the loops and the kernels.
"""

import math
from dataclasses import dataclass

import numpy as np

from pscore.selection.exact import exact, largest
from pscore.selection.rule import CHANCE, RANKED_STEPS, ROOM, SMALL_SIZE, deviation

MOST_PASSES, UNTIL_ZERO = 8, 3
LEVEL_GAIN, DRIFT_GAIN, RISING = 0.6, 0.3, 0.9
LARGEST = float(np.finfo(np.float32).max)


@dataclass
class Tensor:
    """A residual ``x`` (fp32, changed in place), and how often it was passed over."""

    x: np.ndarray
    keep: float = 0.0
    passes: int = 0

    def count_above(self, threshold):
        self.passes += 1
        magnitudes = np.abs(self.x)
        above = np.flatnonzero(~(magnitudes <= np.float32(threshold)))
        return above, float((magnitudes[above] - np.float32(threshold)).sum(dtype=np.float64))

    def take(self, offsets):
        values = self.x[offsets]
        self.x[offsets] = np.float32(self.keep) * values
        return offsets, values


def accumulate(g, theta, u, scale, decay, factor, clip=1.0):
    """The direction that a step adds; ``u``, if it is not None, is brought up to date."""
    d = np.float32(scale) * (np.float32(clip) * g)
    if decay:
        d = d + np.float32(decay) * theta
    if factor:
        u[:] = np.float32(factor) * u + d
        d = u.copy()
    return d


def take_all(tensor):
    """Every entry that is not zero."""
    return tensor.take(np.flatnonzero(tensor.x))


def warm(tensor, k, state):
    """Take ``k`` entries within the tolerance; ``state`` is the tensor's, and changes. Returns offsets and values."""
    n = tensor.x.size
    if k >= n:
        return take_all(tensor)
    if "ranked" in state:
        return rank(tensor, k, state, state["ranked"] - 1)
    threshold, is_small = state.get("threshold", math.inf), n <= SMALL_SIZE
    off = float(deviation(k, CHANCE * is_small))
    steps = 0 if is_small else RANKED_STEPS
    if math.isinf(threshold):
        first = laplace_threshold(tensor.x, k)
        found = search(tensor, k, off, first) if first and not is_small else None
        if not first and not is_small:
            return take_all(tensor)
        if found is None:
            return rank(tensor, k, state, steps)
        threshold = found
    above, excess = tensor.count_above(threshold)
    if (above.size < k - off and threshold != 0) or above.size > ROOM * k:
        found = search(tensor, k, off, threshold, (above, excess))
        if found is None:
            return rank(tensor, k, state, steps)
        threshold = found
        above, excess = tensor.count_above(threshold)
    predict(state, threshold, above.size, excess, k)
    if above.size > k + off:
        above = above[largest(tensor.x[above], k)]
    return tensor.take(above)


def laplace_threshold(x, k):
    """``b·ln(n/k)``, at most the largest magnitude; 32 magnitudes each are summed in fp32, one by one."""
    magnitudes = np.abs(x)
    runs = np.pad(magnitudes, (0, -x.size % 32)).reshape(-1, 32).cumsum(axis=1, dtype=np.float32)[:, -1]
    return min(float(magnitudes.max()), float(runs.sum(dtype=np.float64)) / x.size * math.log(x.size / k))


def rank(tensor, k, state, steps):
    offsets, values = tensor.take(exact(tensor.x, k))
    state.clear()
    if steps:
        state["ranked"] = steps
    else:
        least = np.nextafter(np.abs(values).min(), np.float32(0)) if values.size else math.inf
        state.update(threshold=float(least), drift=0.0)
    return offsets, values


def predict(state, threshold, count, excess, k):
    if threshold == 0 and count <= k:
        state.update(threshold=0.0, drift=0.0)
        return
    best = max(threshold / 2, threshold + excess / count * math.log(count / k))
    expected, drift = state.get("threshold", best), state.get("drift", 0.0)
    drift *= RISING if drift > 0 else 1.0
    level = expected + LEVEL_GAIN * (best - expected)
    drift += DRIFT_GAIN * (level - expected)
    state.update(threshold=max(best / 2, level + drift), drift=drift)


def search(tensor, k, off, first, found=None):
    """A threshold above which ``k`` entries lie, give or take ``off``; None if the passes did not suffice."""
    low, high, scale, plunge, tried = 0.0, math.inf, 0.0, 1, 0
    threshold, count = first, -1

    def update(now, found):
        nonlocal low, high, scale, threshold, count
        above, excess = found
        if count > 0 and above.size > 0 and above.size != count and now != threshold:
            scale = (now - threshold) / math.log(count / above.size)
        elif above.size > 0:
            scale = excess / above.size
        threshold, count = now, above.size
        low, high = (max(low, now), high) if count > k else (low, min(high, now)) if count < k else (low, high)

    update(first, found or tensor.count_above(first))
    if math.isinf(high) and count > k:
        high = float(np.abs(tensor.x).max())
    while abs(count - k) > off:
        tried += 1
        following = single(threshold + scale * math.log(count / k)) if count > 0 and scale > 0 else -1.0
        if not low < following < high:
            if math.isinf(high):
                following = single(2 * threshold)
            elif low > 0:
                following = single(math.sqrt(low) * math.sqrt(high))
            else:
                plunge *= 2
                following = single(high * 2.0 ** (-plunge / 2))
        if tried == UNTIL_ZERO and low == 0:
            following = 0.0
        elif tried > MOST_PASSES or not low < following < high:
            return None
        update(following, tensor.count_above(following))
        if following == 0 and count <= k:
            return 0.0
    return threshold


def single(x):
    return float(np.float32(min(x, LARGEST)))
