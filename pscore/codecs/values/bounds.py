"""The bounds of magnitudes, by block: two fp32 each, before the values."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pscore.codecs.values.format import Values
from pscore.reasons import Reason, Refusal

BLOCK = 512
"""Values that share bounds: 64 bits a block are 1/8 bit a value."""

BOUND_BYTES = 8

Wide = NDArray[np.float64]
Codes = NDArray[np.uint8]

_WORTH_COMPILING = 1024
"""Values below which numpy is used, so that a program with small models never waits for the compiler."""


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


def fourth_root(magnitudes: Values) -> Wide:
    """Return fourth roots, from square roots: every machine rounds these alike."""
    root: Wide = np.sqrt(np.sqrt(magnitudes.astype(np.float64)))
    return root


def codes_of(values: Values, bounds: Values, steps: int, *, sign: int, rooted: bool) -> Codes:
    """Return each value's code: its place between the bounds of its block, in ``steps`` equal steps, and its sign.

    Args:
        values: ``[count]``, finite.
        bounds: of the magnitudes of each block.
        steps: levels but one.
        sign: the bit that is set for a negative value.
        rooted: whether the steps are equal between the fourth roots.
    """
    spaced = fourth_root(bounds) if rooted else bounds.astype(np.float64)
    low, high = spaced[:, 0], spaced[:, 1]
    scale = np.divide(steps, high - low, out=np.zeros_like(low), where=high > low)
    loops = _loops(values.size)
    if loops is not None:
        codes = np.empty(values.size, np.uint8)
        loops.write_codes(values, np.ascontiguousarray(low), scale, float(steps), BLOCK, np.uint8(sign), rooted, codes)
        return codes
    magnitudes = fourth_root(np.abs(values)) if rooted else np.abs(values).astype(np.float64)
    moved = (magnitudes - low.repeat(BLOCK)[: values.size]) * scale.repeat(BLOCK)[: values.size]
    return np.clip(np.rint(moved), 0, steps).astype(np.uint8) | np.where(np.signbit(values), sign, 0).astype(np.uint8)


def levels(bounds: Wide, steps: int) -> Wide:
    """Return float64 ``[blocks, steps + 1]``: equally spaced from the lower bound to the upper one."""
    low, high = bounds[:, :1], bounds[:, 1:]
    return low + (high - low) * (np.arange(steps + 1) / steps)


def look_up(magnitudes: Wide, codes: Codes, count: int) -> Values:
    """Return the values with these codes: the number of a level of their block, the sign in the bit above."""
    table = np.concatenate([magnitudes, -magnitudes], axis=1).astype(np.float32)
    loops = _loops(count)
    if loops is not None:
        values = np.empty(count, np.float32)
        loops.read_codes(table.reshape(-1), codes, table.shape[1], BLOCK, values)
        return values
    rows = np.arange(0, table.size, table.shape[1]).repeat(BLOCK)[:count]
    rows += codes
    return table.reshape(-1).take(rows)


def _loops(count: int) -> Any:
    """Return the compiled loops; ``None`` where there are few values, or no numba."""
    if count < _WORTH_COMPILING:
        return None
    from pscore.codecs.values import loops

    return None if loops.write_codes is None else loops
