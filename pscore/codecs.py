"""Index and value codecs: an array to bytes and back, every decoder checking before it allocates.

The byte formats are those of ``IndexCodec`` and ``ValueCodec`` in the proto. Everything is vectorised numpy on host
memory; a registry maps each enum value to its codec, and a test asserts that none is missing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pscore.reasons import Reason, Refusal
from pscore.v1 import parameter_server_pb2 as pb

Offsets = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class IndexFormat:
    """How strictly increasing offsets in ``[0, length)`` are written.

    Attributes:
        size: bytes that ``encode`` would need for these gaps.
        encode: gaps (offset − previous − 1) to bytes.
        decode: bytes and entry count to gaps; raises :class:`Refusal` where the bytes cannot be such gaps.
    """

    size: Callable[[Offsets], int]
    encode: Callable[[Offsets], bytes]
    decode: Callable[[bytes, int], Offsets]


def _gaps(offsets: Offsets) -> Offsets:
    return np.diff(offsets, prepend=-1) - 1


def _encode_raw32(gaps: Offsets) -> bytes:
    return (np.cumsum(gaps + 1) - 1).astype("<u4").tobytes()


def _decode_raw32(data: bytes, count: int) -> Offsets:
    if len(data) != 4 * count:
        raise Refusal(Reason.BAD_CHUNK, f"{len(data)} index bytes for {count} entries of 4 bytes")
    return _gaps(np.frombuffer(data, "<u4").astype(np.int64))


def _gap_format(dtype: str) -> IndexFormat:
    """Gaps in a narrow unsigned type whose largest value escapes to uint32 at the end."""
    width = np.dtype(dtype).itemsize
    escape = int(np.iinfo(dtype).max)

    def size(gaps: Offsets) -> int:
        return width * gaps.size + 4 * int(np.count_nonzero(gaps >= escape))

    def encode(gaps: Offsets) -> bytes:
        long = gaps[gaps >= escape]
        return np.minimum(gaps, escape).astype(dtype).tobytes() + long.astype("<u4").tobytes()

    def decode(data: bytes, count: int) -> Offsets:
        if len(data) < width * count:
            raise Refusal(Reason.BAD_CHUNK, f"{len(data)} index bytes for {count} entries of {width} bytes or more")
        narrow = np.frombuffer(data, dtype, count)
        escaped = narrow == escape
        long = int(np.count_nonzero(escaped))
        if len(data) != width * count + 4 * long:
            raise Refusal(Reason.BAD_CHUNK, f"{len(data)} index bytes, but {count} entries with {long} escapes")
        gaps = narrow.astype(np.int64)
        if long:
            wide = np.frombuffer(data, "<u4", long, width * count)
            if int(wide.min()) < escape:
                raise Refusal(Reason.BAD_CHUNK, "an escaped gap is short enough not to be escaped")
            gaps[escaped] = wide
        return gaps

    return IndexFormat(size, encode, decode)


INDEX_FORMATS: dict[int, IndexFormat] = {
    pb.INDEX_CODEC_RAW32: IndexFormat(lambda gaps: 4 * gaps.size, _encode_raw32, _decode_raw32),
}
"""Every index codec but DENSE, which has no bytes."""

VALUE_DTYPES: dict[int, torch.dtype] = {
    pb.VALUE_CODEC_FP32: torch.float32,
    pb.VALUE_CODEC_FP16: torch.float16,
    pb.VALUE_CODEC_BF16: torch.bfloat16,
}
"""The dtype that each value codec writes."""

VALUE_CODECS: dict[torch.dtype, "pb.ValueCodec.ValueType"] = {
    dtype: codec  # type: ignore[misc]
    for codec, dtype in VALUE_DTYPES.items()
}


def encode_offsets(offsets: Offsets) -> tuple["pb.IndexCodec.ValueType", bytes]:
    """Write offsets (strictly increasing, from 0, below 2³²) in the codec that needs the fewest bytes."""
    gaps = _gaps(offsets)
    codec = min(INDEX_FORMATS, key=lambda candidate: INDEX_FORMATS[candidate].size(gaps))
    return codec, INDEX_FORMATS[codec].encode(gaps)  # type: ignore[return-value]


def decode_offsets(codec: int, data: bytes, count: int, length: int) -> Offsets:
    """Read ``count`` offsets and check that they rise strictly and stay below ``length``.

    Raises:
        Refusal: ``UNKNOWN_CODEC``, or ``BAD_CHUNK`` with what is wrong.
    """
    index_format = INDEX_FORMATS.get(codec)
    if index_format is None:
        raise Refusal(Reason.UNKNOWN_CODEC, f"index codec {codec} is not known")
    gaps = index_format.decode(data, count)
    if gaps.size and int(gaps.min()) < 0:
        raise Refusal(Reason.BAD_CHUNK, "indices are unsorted or repeated")
    offsets: Offsets = np.cumsum(gaps + 1) - 1
    if offsets.size and int(offsets[-1]) >= length:
        raise Refusal(Reason.BAD_CHUNK, f"index {int(offsets[-1])} lies outside a span of {length} elements")
    return offsets


def encode_values(values: torch.Tensor) -> tuple["pb.ValueCodec.ValueType", bytes]:
    """Write values in their own dtype, which must be fp32, fp16 or bf16."""
    raw = values.detach().contiguous().cpu().view(torch.uint8)
    return VALUE_CODECS[values.dtype], raw.numpy().tobytes()


def decode_values(codec: int, data: bytes, count: int) -> torch.Tensor:
    """Read ``count`` values as fp32 (exact from every codec).

    Raises:
        Refusal: ``UNKNOWN_CODEC``, or ``BAD_CHUNK`` where the length is wrong.
    """
    dtype = VALUE_DTYPES.get(codec)
    if dtype is None:
        raise Refusal(Reason.UNKNOWN_CODEC, f"value codec {codec} is not known")
    if len(data) != dtype.itemsize * count:
        raise Refusal(Reason.BAD_CHUNK, f"{len(data)} value bytes for {count} entries of {dtype.itemsize}")
    if not count:
        return torch.empty(0)
    return torch.frombuffer(bytearray(data), dtype=dtype).float()
