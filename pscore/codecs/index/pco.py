"""Gaps as a standalone file of the pcodec library (https://github.com/pcodec/pcodec): fewest bytes, slow to encode."""

import math

import numpy as np

from pscore.codecs.index.format import IndexFormat, Offsets, gaps_of, offsets_of
from pscore.reasons import Reason, Refusal

_FILE_BYTES = 60
"""What a file of few numbers needs beside them: its header and the bins of the histogram."""


def _encode(offsets: Offsets, length: int) -> bytes:
    from pcodec import ChunkConfig, DeltaSpec, ModeSpec, standalone

    # Gaps of a support have no trend and no common factor: looking for either costs time and finds nothing.
    config = ChunkConfig(mode_spec=ModeSpec.classic(), delta_spec=DeltaSpec.no_op())
    return bytes(standalone.simple_compress(gaps_of(offsets), config))


def _decode(data: bytes, count: int, length: int) -> Offsets:
    from pcodec import standalone

    gaps = np.empty(count, np.uint32)
    try:
        progress = standalone.simple_decompress_into(data, gaps)
    except (RuntimeError, TypeError) as error:
        raise Refusal(Reason.BAD_CHUNK, f"index bytes are no pcodec file of uint32: {error}") from error
    if progress.n_processed != count or not progress.finished:
        raise Refusal(Reason.BAD_CHUNK, f"a pcodec file has not exactly {count} entries")
    return offsets_of(gaps, length)


def _bits(count: int, length: int) -> float:
    density = count / length
    entropy = 0.0
    if density < 1:
        entropy = -(density * math.log2(density) + (1 - density) * math.log2(1 - density)) / density
    return 1.0035 * entropy * count + 8 * _FILE_BYTES


PCODEC = IndexFormat("pcodec", _encode, _decode, _bits, nanoseconds=lambda count, length: 2e4 + 24.0 * count)
