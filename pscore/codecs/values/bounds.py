"""The bounds of magnitudes, by block: two fp32 each, before the values."""

import numpy as np
from numpy.typing import NDArray

from pscore.codecs.values.format import Values
from pscore.reasons import Reason, Refusal

BLOCK = 512
"""Values that share bounds: 64 bits a block are 1/8 bit a value."""

BOUND_BYTES = 8

Wide = NDArray[np.float64]


def bounds_of(magnitudes: Values) -> Values:
    """Return fp32 ``[blocks, 2]``: least and largest magnitude of each block.

    Raises:
        Refusal: ``NON_FINITE``.
    """
    starts = np.arange(0, magnitudes.size, BLOCK)
    if not starts.size:
        return np.empty((0, 2), np.float32)
    bounds = np.stack([np.minimum.reduceat(magnitudes, starts), np.maximum.reduceat(magnitudes, starts)], axis=1)
    _check_finite(bounds)
    return bounds


def read_bounds(data: bytes, count: int) -> Values:
    """Read the bounds before ``count`` values.

    Raises:
        Refusal: ``NON_FINITE``, or ``BAD_CHUNK`` where they are negative or in the wrong order.
    """
    bounds = np.frombuffer(data, "<f4", 2 * -(-count // BLOCK)).astype(np.float32).reshape(-1, 2)
    _check_finite(bounds)
    if np.signbit(bounds).any() or (bounds[:, 0] > bounds[:, 1]).any():
        raise Refusal(Reason.BAD_CHUNK, "bounds of magnitudes are negative or in the wrong order")
    return bounds


def _check_finite(bounds: Values) -> None:
    if not np.isfinite(bounds).all():
        raise Refusal(Reason.NON_FINITE, "a bound of magnitudes is not finite")


def positions(magnitudes: Wide, bounds: Wide, steps: int) -> NDArray[np.uint8]:
    """Return where each magnitude lies between the bounds of its block, in ``steps`` equal steps, rounded."""
    low, high = bounds[:, 0], bounds[:, 1]
    scale = np.divide(steps, high - low, out=np.zeros_like(low), where=high > low)
    count = magnitudes.size
    moved = (magnitudes - low.repeat(BLOCK)[:count]) * scale.repeat(BLOCK)[:count]
    return np.clip(np.rint(moved), 0, steps).astype(np.uint8)


def levels(bounds: Wide, steps: int) -> Wide:
    """Return float64 ``[blocks, steps + 1]``: equally spaced from the lower bound to the upper one."""
    low, high = bounds[:, :1], bounds[:, 1:]
    return low + (high - low) * (np.arange(steps + 1) / steps)


def look_up(magnitudes: Wide, codes: NDArray[np.uint8], count: int) -> Values:
    """Return the values with these codes: the number of a level of their block, the sign in the bit above."""
    table = np.concatenate([magnitudes, -magnitudes], axis=1).astype(np.float32)
    rows = np.arange(0, table.size, table.shape[1]).repeat(BLOCK)[:count]
    rows += codes
    return table.reshape(-1).take(rows)
