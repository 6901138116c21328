"""fp32 numbers kept in bf16, half the bytes: rounded up or down by chance, so that no rounding adds up.

A number between two neighbours of bf16 becomes the upper one with the probability by which it is nearer to that: it is
right on average (stochastic rounding; Gupta et al., ICML 2015). To the nearest, what is added in steps below half a
neighbour's distance would be lost for ever.
"""

import numpy as np
from numpy.typing import NDArray

from pscore.selection.rule import Reals

Halves = NDArray[np.uint16]
"""Bits of bf16."""


def widened(bits: Halves) -> Reals:
    """Return the numbers in fp32, exactly."""
    numbers = bits.astype(np.uint32)
    numbers <<= 16
    return numbers.view(np.float32)


def narrowed(numbers: Reals, turn: int) -> Halves:
    """Round to bf16, up or down by chance.

    The chance is a hash of the number, its place and the ``turn``, so the same input gives the same bits. Infinity and
    NaN stay what they are; a finite number beyond the largest of bf16 becomes that.
    """
    from pscore.selection.host import rounding_loops

    bits = np.empty(numbers.shape, np.uint16)
    flat = np.ascontiguousarray(numbers).reshape(-1).view(np.uint32)
    rounding_loops.narrow.on(numbers.size)(flat, np.uint32(turn & 0xFFFFFFFF), bits.reshape(-1))
    return bits
