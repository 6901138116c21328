"""Layouts and segments for the tests of the core."""

import torch
from hypothesis import strategies as st

from pscore.model.layout import ModelLayout, Span, TensorSpec
from pscore.model.sparse_slice import SparseSlice

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@st.composite
def layouts(draw, min_tensors=1, max_tensors=8):
    """Small layouts with scalars, empty tensors and mixed dtypes."""
    specs = draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=min_tensors, max_size=max_tensors))
    return ModelLayout(tuple(TensorSpec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(specs)))


WIDTHS = {
    1: (torch.uint8, torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64),
    2: (torch.bfloat16, torch.float16, torch.int16, torch.float32, torch.complex64),
    4: (torch.float32, torch.int32, torch.float64, torch.int64, torch.complex64),
}
"""Dtypes whose elements are whole words of so many bytes."""


@st.composite
def feeds(draw):
    """Layouts of feeds: small, in words of each width, with elements of one and of several."""
    word_bytes = draw(st.sampled_from([*WIDTHS]))
    specs = draw(st.lists(st.tuples(shapes, st.sampled_from(WIDTHS[word_bytes])), min_size=1, max_size=8))
    made = (TensorSpec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(specs))
    return ModelLayout(tuple(made), word_bytes=word_bytes)


def any_words(layout, seed):
    """Words of any bits for a whole feed."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = layout.size * layout.word_bytes
    return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8).view(layout.value_dtype)


@st.composite
def spans(draw, end):
    """A span inside [0, end]."""
    cuts = sorted(draw(st.tuples(st.integers(0, end), st.integers(0, end))))
    return Span(*cuts)


@st.composite
def segments(draw, max_length=300, dtypes=DTYPES, min_entries=0):
    """A dense or sparse segment anywhere in a flat layout; its values tell its entries apart."""
    start, length = draw(st.integers(0, 1000)), draw(st.integers(max(1, min_entries), max_length))
    dtype = draw(st.sampled_from(dtypes))
    if draw(st.booleans()):
        return SparseSlice(Span(start, start + length), None, numbered(length, dtype))
    chosen = draw(st.sets(st.integers(0, length - 1), min_size=min_entries, max_size=length))
    offsets = torch.tensor(sorted(chosen), dtype=torch.int64)
    return SparseSlice(Span(start, start + length), offsets, numbered(len(chosen), dtype))


def numbered(count, dtype=torch.float32):
    """Distinct values that every dtype holds exactly (for up to 256 of them)."""
    return (torch.arange(count) + 1).float().to(dtype)


def as_dict(*parts):
    """Entries of segments by index in the flat layout."""
    found = {}
    for part in parts:
        offsets = range(part.span.length) if part.offsets is None else part.offsets.tolist()
        for offset, value in zip(offsets, part.values.tolist(), strict=True):
            assert 0 <= offset < part.span.length
            assert part.span.start + offset not in found
            found[part.span.start + offset] = value
    return found
