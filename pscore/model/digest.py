"""A digest of a model's values that follows changes at their cost.

It is the sum, modulo 2^64 in each half, over all elements of a 64-bit mixture of the element's index in the flat layout
and its bits in the parameter's own data type. So a change takes one term out and puts another in, the digest of a model
is the sum of its shards', and two replicas of equal digests are equal, but for a chance of 2^-128 for an error that
knows nothing of the mixture. It finds damage and mistakes; against forgery TLS is there.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pscore.model import digest_loops
from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice

DIGEST_BYTES = 16
_BLOCK = 1 << 18  # elements whose bits are made at a time
_MASK = (1 << 64) - 1
_BITS: dict[torch.dtype, Any] = {
    torch.float32: np.uint32, torch.float16: np.uint16, torch.bfloat16: np.uint16,
    torch.uint8: np.uint8, torch.int16: np.uint16, torch.int32: np.uint32,
}  # fmt: skip


class ModelDigest:
    """A digest that grows by entries, and loses entries; begins as that of nothing, or from :attr:`value`."""

    def __init__(self, layout: ModelLayout, value: bytes = bytes(DIGEST_BYTES)) -> None:
        self._layout = layout
        self._low, self._high = int.from_bytes(value[:8], "little"), int.from_bytes(value[8:], "little")

    @property
    def value(self) -> bytes:
        """The digest: 16 bytes, two halves, each little-endian."""
        return self._low.to_bytes(8, "little") + self._high.to_bytes(8, "little")

    def add(self, segment: SparseSlice) -> None:
        """Put entries in, whose values (on the host: fp32, words, or of their own dtype) count in the own dtypes."""
        self._change(segment, 1)

    def remove(self, segment: SparseSlice) -> None:
        """Take entries out."""
        self._change(segment, -1)

    def _change(self, segment: SparseSlice, sign: int) -> None:
        for piece in _blocks(self._layout, segment):
            words = words_of(piece.values)
            if piece.offsets is None:
                found = digest_loops.of_run.on(words.size)(words, piece.span.start)
            else:
                found = digest_loops.at.on(words.size)(words, piece.offsets.numpy(), piece.span.start)
            self._low = (self._low + sign * int(found[0])) & _MASK
            self._high = (self._high + sign * int(found[1])) & _MASK


def words_of(values: torch.Tensor) -> NDArray[np.uint32]:
    """Return the bits of values on the host, fp32, fp16, bf16 or words of a feed, one word each."""
    bits = values.contiguous().view(torch.uint8).numpy().view(_BITS[values.dtype])
    words: NDArray[np.uint32] = bits.astype(np.uint32, copy=False)
    return words


def total(digests: list[bytes]) -> bytes:
    """Return the digest of a model from those of its shards."""
    halves = [sum(int.from_bytes(each[i : i + 8], "little") for each in digests) & _MASK for i in (0, 8)]
    return b"".join(half.to_bytes(8, "little") for half in halves)


def _blocks(layout: ModelLayout, segment: SparseSlice) -> Iterator[SparseSlice]:
    """Cut entries at changes of dtype and into blocks, with values in the parameters' dtypes."""
    for dtype, run in layout.dtype_runs(segment.span):
        piece = segment.clip(run)
        for first in range(0, piece.entries if piece is not None else 0, _BLOCK):
            assert piece is not None
            values = piece.values[first : first + _BLOCK].to(dtype)
            if piece.offsets is not None:
                yield SparseSlice(piece.span, piece.offsets[first : first + _BLOCK], values)
            else:
                start = piece.span.start + first
                yield SparseSlice(Span(start, start + values.numel()), None, values)
