"""One bit a value: its sign, and one mean magnitude a block (sparse ternary compression, Sattler et al. 2019).

The fp32 means come first; then a bit a value, set for negative ones. Every value of a block is read as plus or minus
the mean, a zero too, so another codec suits a dense tensor of many zeros better.
"""

import numpy as np

from pscore.wire.codecs.values.format import ValueFormat, Values
from pscore.wire.errors import ErrorCode, Rejected

_BLOCK = 512


def _write(values: Values) -> bytes:
    starts = np.arange(0, values.size, _BLOCK)
    if not starts.size:
        return b""
    sums = np.add.reduceat(np.abs(values), starts, dtype=np.float64)
    means = (sums / np.diff(starts, append=values.size)).astype("<f4")
    return means.tobytes() + np.packbits(np.signbit(values), bitorder="little").tobytes()


def _read(data: bytes, count: int) -> Values:
    means = np.frombuffer(data, "<f4", -(-count // _BLOCK)).astype(np.float32)
    if not np.isfinite(means).all():
        raise Rejected(ErrorCode.NON_FINITE, "a mean magnitude is not finite")
    if np.signbit(means).any():
        raise Rejected(ErrorCode.BAD_CHUNK, "a mean magnitude is negative")
    packed = np.frombuffer(data, np.uint8, -1, means.nbytes)
    if count % 8 and packed[-1] >> count % 8:
        raise Rejected(ErrorCode.BAD_CHUNK, "bits behind the last value are not zero")
    values = means.repeat(_BLOCK)[:count]
    values.view(np.uint32)[:] |= np.unpackbits(packed, count=count, bitorder="little").astype(np.uint32) << 31
    return values


SIGN_MEAN = ValueFormat("sign_mean", 1, False, _write, _read, _BLOCK, 4)
