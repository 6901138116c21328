"""The bounds of magnitudes, by block: two fp32 each, before the values."""

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pscore.wire.codecs.values.format import Values
from pscore.wire.errors import ErrorCode, Rejected

BLOCK = 512
"""Values that share bounds: 64 bits a block are 1/8 bit a value."""

BOUND_BYTES = 8

Real = TypeVar("Real", np.float32, np.float64)
Codes = NDArray[np.uint8]

_WORTH_COMPILING = 1024
"""Values below which numpy is used, so that a program with small models never waits for the compiler."""


def bounds_of(values: Values) -> Values:
    """Return fp32 ``[blocks, 2]``: least and largest magnitude of each block.

    Raises:
        Refusal: ``NON_FINITE``.
    """
    loops = loops_for(values.size)
    if loops is not None:
        bounds = np.empty((-(-values.size // BLOCK), 2), np.float32)
        loops.find_bounds(values.view(np.int32), BLOCK, bounds.view(np.int32))
    elif values.size:
        starts, magnitudes = np.arange(0, values.size, BLOCK), np.abs(values)
        bounds = np.stack([np.minimum.reduceat(magnitudes, starts), np.maximum.reduceat(magnitudes, starts)], axis=1)
    else:
        bounds = np.empty((0, 2), np.float32)
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
        raise Rejected(ErrorCode.BAD_CHUNK, "bounds of magnitudes are negative or in the wrong order")
    return bounds


def _check_finite(bounds: Values) -> None:
    if not np.isfinite(bounds).all():
        raise Rejected(ErrorCode.NON_FINITE, "a bound of magnitudes is not finite")


def fourth_root(magnitudes: NDArray[Real]) -> NDArray[Real]:
    """Return fourth roots in the dtype of the magnitudes, from square roots: every machine rounds these alike."""
    root: NDArray[Real] = np.sqrt(np.sqrt(magnitudes))
    return root


def spacing(bounds: NDArray[Real], steps: int) -> tuple[NDArray[Real], NDArray[Real]]:
    """Return of each block where its levels begin, and how many of them make up one; 0 where they are all alike."""
    low, high = np.ascontiguousarray(bounds[:, 0]), bounds[:, 1]
    return low, np.divide(steps, high - low, out=np.zeros_like(low), where=high > low)


def nearest(places: NDArray[Real], values: Values, bounds: Values, steps: int) -> Codes:
    """Return the levels next to ``places``, which count steps; the largest magnitude of a block has the last one."""
    levels = np.clip(np.rint(places), 0, steps)
    levels[np.abs(values) >= by_value(bounds[:, 1], values.size)] = steps
    return levels.astype(np.uint8)


def by_value(of_blocks: NDArray[Real], count: int) -> NDArray[Real]:
    """Repeat what belongs to a block for each of its values."""
    return of_blocks.repeat(BLOCK)[:count]


def loops_for(count: int) -> Any:
    """Return the compiled loops; ``None`` where there are few values, or no numba."""
    if count < _WORTH_COMPILING:
        return None
    from pscore.wire.codecs.values import loops

    return None if loops.find_bounds is None else loops
