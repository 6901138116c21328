"""How many entries, and of how many bits, a share of the dense bytes carries.

An element of a dense fp32 push is 32 bits. A sparse one costs the entropy of the places, ``H(ρ)``, and ``ρ`` times the
bits of a value.
"""

import math
from typing import NamedTuple

from pscore.model.sparse_slice import SparseSlice
from pscore.wire.codecs.format import ValueFormat
from pscore.wire.codecs.values import VALUE_FORMATS
from pscore.wire.v1 import parameter_server_pb2 as pb

FEWEST_BYTES = 1.0
"""The rate of a link, in bytes a second, at which the index codec with the fewest bytes is chosen."""

_DENSE_BITS = 32.0
_CODING_BITS = 0.2  # of an entry, beyond the entropy: the Rice code and the messages (measured)
_USED = 0.97  # of a share: a selection's number of entries varies
_DENSE = (pb.VALUE_CODEC_FP32, pb.VALUE_CODEC_BF16, pb.VALUE_CODEC_INT8, pb.VALUE_CODEC_INT4)
_SPARSE = pb.VALUE_CODEC_INT4


class Fit(NamedTuple):
    """What fits a share: the density, and the value codec by its number in the proto."""

    density: float
    value: int


def bits_of(value: ValueFormat) -> float:
    """Return the bits of a value, with its part of the block's bounds."""
    return value.bits + 8 * value.bound_bytes / value.block


def element_bits(density: float, value: ValueFormat) -> float:
    """Return the bits that an element costs at a density, entries being at random places."""
    if density >= 1:
        return bits_of(value)
    entropy = -sum(p * math.log2(p) for p in (density, 1 - density) if p > 0)
    return entropy + density * (bits_of(value) + _CODING_BITS)


def is_less_dense(entries: SparseSlice, codec: int) -> bool:
    """Tell whether entries take fewer bytes in a value codec with zeros among them than with their places."""
    value = VALUE_FORMATS[codec]
    return entries.offsets is not None and element_bits(entries.entries / entries.span.length, value) > bits_of(value)


def roomiest(entries: SparseSlice, form: Fit) -> int:
    """Return the value codec of the most bits in which entries take no more than a span's part of the budget.

    They may be fewer than the budget carries: of the touched rows of an embedding, say.
    """
    budget, density = element_bits(form.density, VALUE_FORMATS[form.value]), entries.entries / entries.span.length
    wider = (codec for codec in _DENSE if element_bits(density, VALUE_FORMATS[codec]) <= budget)
    return next(wider, form.value)


def density_of(bits: float, value: ValueFormat) -> float:
    """Return the density at which an element costs ``bits``: the inverse of :func:`element_bits`."""
    low, high = 0.0, 1 / (1 + 2.0 ** -bits_of(value))  # the cost rises up to there
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if element_bits(middle, value) < bits else (low, middle)
    return low


def least_share(whole: float) -> float:
    """Return the share of the dense bytes that tensors take which are sent whole, being ``whole`` of all elements."""
    return whole * bits_of(VALUE_FORMATS[_SPARSE]) / _DENSE_BITS


def most_whole(size: int, share: float) -> float:
    """Return the elements that may be sent whole of a model's ``size``: those that take a quarter of the share."""
    return size * share / least_share(4.0)


def fit(share: float, whole: float = 0.0) -> Fit:
    """Return the form of a push or reply that takes ``share`` of the dense fp32 bytes.

    As many entries as fit, and then as many bits: at equal bytes, few entries of many bits train worse
    (docs/evidence/accuracy.md). ``whole`` is the share of elements in tensors that are sent whole; ``share`` is above
    :func:`least_share` of it.
    """
    bits = _DENSE_BITS * share
    for codec in _DENSE:
        if bits_of(VALUE_FORMATS[codec]) <= bits:
            return Fit(1.0, codec)
    left = _DENSE_BITS * _USED * (share - least_share(whole)) / (1 - whole)
    return Fit(density_of(left, VALUE_FORMATS[_SPARSE]), _SPARSE)
