"""Value codecs by their number in the proto; a test asserts that none is missing.

FP32, FP16, BF16: floating-point numbers, little-endian, rounded to nearest even.
INT8, INT4: :mod:`pscore.wire.codecs.bounded`.
WORD8, WORD16, WORD32: the words of a feed, bits of which nothing is known; these alone are not read as fp32.
SIGN_MEAN: one bit a value and one mean magnitude a block (sparse ternary compression, Sattler et al. 2019). The fp32
means come first; then a bit a value, set for negative ones. Every value of a block is read as plus or minus the mean,
a zero too, so another codec suits a dense tensor of many zeros better.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pscore.selection.host.rounding import widened
from pscore.wire.codecs import value_loops as loops
from pscore.wire.codecs.bounded import INT4, INT8
from pscore.wire.codecs.format import ValueFormat, Values
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb

_SERIAL = 1 << 14  # elements that torch converts in the calling thread; for more it would start threads of its own
_SIGN_BLOCK = 512


def _read_fp32(data: bytes, count: int) -> Values:
    # A copy: protobuf's bytes are read-only, and torch wants memory that it may write.
    values = np.empty(count, np.float32)
    octets = np.frombuffer(data, np.uint8)
    return _require_finite("fp32", values, loops.read_fp32.on(count)(octets, values.view(np.int32)))


def _read_fp16(data: bytes, count: int) -> Values:
    return _require_finite("fp16", np.frombuffer(data, "<f2").astype(np.float32))


def _read_bf16(data: bytes, count: int) -> Values:
    return _require_finite("bf16", widened(np.frombuffer(data, "<u2")))


def _require_finite(name: str, values: Values, finite: bool | None = None) -> Values:
    if not (np.isfinite(values).all() if finite is None else finite):
        raise Rejected(ErrorCode.NON_FINITE, f"a {name} value is not finite")
    return values


def _write_fp16(values: Values) -> tuple[bytes, Values]:
    bits = _narrowed(values, torch.float16)
    return bits.tobytes(), bits.view("<f2").astype(np.float32)


def _write_bf16(values: Values) -> tuple[bytes, Values]:
    bits = _narrowed(values, torch.bfloat16)
    return bits.tobytes(), widened(bits)


def _narrowed(values: Values, dtype: torch.dtype) -> NDArray[np.uint16]:
    """Return the bits of the values in a dtype of 16 bits, little-endian."""
    largest, bits = torch.finfo(dtype).max, np.empty(values.size, "<u2")
    for first in range(0, values.size, _SERIAL):
        part = torch.from_numpy(values[first : first + _SERIAL]).clamp(-largest, largest).to(dtype)
        bits[first : first + _SERIAL] = part.view(torch.uint16).numpy()
    return bits


def _words(name: str, dtype: Any) -> ValueFormat:
    def write(words: Values) -> tuple[bytes, Values]:
        return words.tobytes(), words

    def read(data: bytes, count: int) -> Values:
        return np.frombuffer(data, dtype, count).copy()

    return ValueFormat(name, 8 * np.dtype(dtype).itemsize, False, write, read)


def _write_signs(values: Values) -> tuple[bytes, Values]:
    starts, signs = np.arange(0, values.size, _SIGN_BLOCK), np.signbit(values)
    if not starts.size:
        return b"", values
    sums = np.add.reduceat(np.abs(values), starts, dtype=np.float64)
    means = (sums / np.diff(starts, append=values.size)).astype("<f4")
    return means.tobytes() + np.packbits(signs, bitorder="little").tobytes(), _signed(means, signs)


def _read_signs(data: bytes, count: int) -> Values:
    means = np.frombuffer(data, "<f4", -(-count // _SIGN_BLOCK)).astype(np.float32)
    if not np.isfinite(means).all():
        raise Rejected(ErrorCode.NON_FINITE, "a mean magnitude is not finite")
    if np.signbit(means).any():
        raise Rejected(ErrorCode.BAD_CHUNK, "a mean magnitude is negative")
    packed = np.frombuffer(data, np.uint8, -1, means.nbytes)
    if count % 8 and packed[-1] >> count % 8:
        raise Rejected(ErrorCode.BAD_CHUNK, "bits behind the last value are not zero")
    return _signed(means, np.unpackbits(packed, count=count, bitorder="little"))


def _signed(means: Values, signs: NDArray[np.generic]) -> Values:
    values = means.repeat(_SIGN_BLOCK)[: signs.size]
    values.view(np.uint32)[:] |= signs.astype(np.uint32) << np.uint32(31)
    return values


VALUE_FORMATS: dict[int, ValueFormat] = {
    pb.VALUE_CODEC_FP32: ValueFormat("fp32", 32, True, lambda values: (values.tobytes(), values), _read_fp32),
    pb.VALUE_CODEC_FP16: ValueFormat("fp16", 16, False, _write_fp16, _read_fp16),
    pb.VALUE_CODEC_BF16: ValueFormat("bf16", 16, False, _write_bf16, _read_bf16),
    pb.VALUE_CODEC_INT8: INT8,
    pb.VALUE_CODEC_INT4: INT4,
    pb.VALUE_CODEC_SIGN_MEAN: ValueFormat("sign_mean", 1, False, _write_signs, _read_signs, _SIGN_BLOCK, 4),
}

WORD_FORMATS: dict[int, ValueFormat] = {
    pb.VALUE_CODEC_WORD8: _words("word8", np.uint8),
    pb.VALUE_CODEC_WORD16: _words("word16", "<i2"),
    pb.VALUE_CODEC_WORD32: _words("word32", "<i4"),
}
"""The codecs of the words of feeds, uint8, int16 and int32."""

CODEC_OF_DTYPE: dict[torch.dtype, int] = {
    torch.float32: pb.VALUE_CODEC_FP32,
    torch.float16: pb.VALUE_CODEC_FP16,
    torch.bfloat16: pb.VALUE_CODEC_BF16,
    torch.uint8: pb.VALUE_CODEC_WORD8,
    torch.int16: pb.VALUE_CODEC_WORD16,
    torch.int32: pb.VALUE_CODEC_WORD32,
}
"""The codec that writes each dtype exactly."""


def host_values(values: torch.Tensor) -> Values:
    """Return fp32, fp16 or bf16 values as fp32 on the host, exactly; fp32 and words there already share their memory.

    In numpy: for many values torch would start a pool of threads for each thread that calls it.
    """
    tensor = values.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return widened(tensor.contiguous().view(torch.uint16).numpy())
    return tensor.numpy().astype("float32", copy=False) if tensor.is_floating_point() else tensor.numpy()


def format_of(codec: int) -> ValueFormat:
    """Return a codec of values or words by its number."""
    return VALUE_FORMATS[codec] if codec in VALUE_FORMATS else WORD_FORMATS[codec]


def decode_values(codec: int, data: bytes, count: int, dtype: torch.dtype = torch.float32) -> Values:
    """Read ``count`` finite values as fp32, or words of a feed as their ``dtype``; raises :class:`Rejected`."""
    if dtype != torch.float32 and codec == CODEC_OF_DTYPE[dtype]:
        return WORD_FORMATS[codec].decode(data, count)
    if dtype != torch.float32 or codec not in VALUE_FORMATS:
        raise Rejected(ErrorCode.UNKNOWN_CODEC, f"value codec {codec} is not known here")
    return VALUE_FORMATS[codec].decode(data, count)
