"""How others send which of a model's 16-bit words have changed: bytes of one difference, by code.

Each is the code's core, without its files or calls: int32 places with bf16 values as vLLM, verl and TRL send them; the
XOR of both models, compressed, as slime, SkyRL and ModelExpress do; gaps between places with the XOR of the words,
compressed, as NeMo-RL does; the same with the words themselves, near to what PULSE does.
"""

from collections.abc import Callable, Mapping

import numpy as np
import zstandard
from numpy.typing import NDArray

Words = NDArray[np.uint16]

_LEVEL = 1  # of zstd, which all of them use


def compressed(*parts: NDArray[np.generic]) -> int:
    """Return the bytes of arrays, one behind the other, after zstd."""
    return len(zstandard.ZstdCompressor(level=_LEVEL).compress(b"".join(part.tobytes() for part in parts)))


def _gaps(places: NDArray[np.int64]) -> NDArray[np.generic]:
    """Return the elements between places, in the fewest bytes that hold each."""
    gaps = np.diff(places, prepend=-1) - 1
    return gaps.astype(np.uint16 if gaps.max(initial=0) <= 0xFFFF else np.uint32)


def _int32_and_words(before: Words, after: Words) -> int:
    return 6 * int(np.count_nonzero(before != after))


def _whole_xor(before: Words, after: Words) -> int:
    return compressed(before ^ after)


def _gaps_and_words(before: Words, after: Words) -> int:
    places = np.flatnonzero(before != after)
    return compressed(_gaps(places), after[places])


def _gaps_and_xor(before: Words, after: Words) -> int:
    places = np.flatnonzero(before != after)
    return compressed(_gaps(places), (before ^ after)[places])


GAPS_AND_XOR = "gaps, XOR, zstd"
CODES: Mapping[str, Callable[[Words, Words], int]] = {
    "int32, bf16": _int32_and_words,
    "XOR of all, zstd": _whole_xor,
    "gaps, bf16, zstd": _gaps_and_words,
    GAPS_AND_XOR: _gaps_and_xor,
}
"""By name: from the words before and after to bytes."""
