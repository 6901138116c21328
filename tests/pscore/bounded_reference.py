"""Levels between bounds in numpy: the reference for the loops of INT8 and INT4 (docs/reference/wire-format.md)."""

import numpy as np

from pscore.wire.codecs.value_loops import BLOCK

_RATIOS8, _RATIOS4 = np.arange(128) / 127, np.arange(8) / 7


def write8(values):
    """Bytes of finite values, and the values that are read from them."""
    magnitudes, bounds = _bounds_of(values)
    low, spread = bounds[:, 0].astype(np.float64), bounds[:, 1].astype(np.float64) - bounds[:, 0]
    scale = np.divide(127, spread, out=np.zeros_like(low), where=spread > 0)
    levels = np.clip(np.rint((magnitudes - _by_value(low, values)) * _by_value(scale, values)), 0, 127)
    levels[magnitudes >= _by_value(bounds[:, 1], values)] = 127
    codes = levels.astype(np.uint8) | np.signbit(values).astype(np.uint8) << 7
    decoded = (_by_value(low, codes) + _by_value(spread, codes) * _RATIOS8[codes & 127]).astype(np.float32)
    decoded[codes > 127] *= -1
    return bounds.tobytes() + codes.tobytes(), decoded


def write4(values):
    """The same with half a byte a value."""
    magnitudes, bounds = _bounds_of(values)
    roots = np.sqrt(np.sqrt(bounds.astype(np.float64)))
    roots = roots[:, :1] + (roots[:, 1:] - roots[:, :1]) * _RATIOS4
    squares = roots * roots
    levels = np.minimum(squares * squares, bounds[:, 1:]).astype(np.float32)
    levels = np.concatenate([levels, -levels], axis=1)
    cuts = ((levels[:, :7].astype(np.float64) + levels[:, 1:8]) / 2).astype(np.float32)
    cuts = np.where(cuts < levels[:, 1:8], cuts, levels[:, :7])
    codes = (magnitudes[:, None] > _by_value(cuts, values)).sum(1, dtype=np.uint8)
    codes |= np.signbit(values).astype(np.uint8) << 3
    packed = codes[::2].copy()
    packed[: values.size // 2] |= codes[1::2] << 4
    return bounds.tobytes() + packed.tobytes(), _by_value(levels, values)[np.arange(values.size), codes]


def _bounds_of(values):
    starts, magnitudes = np.arange(0, values.size, BLOCK), np.abs(values)
    bounds = np.stack([np.minimum.reduceat(magnitudes, starts), np.maximum.reduceat(magnitudes, starts)], 1)
    return magnitudes, bounds


def _by_value(of_blocks, values):
    return of_blocks.repeat(BLOCK, axis=0)[: values.size]
