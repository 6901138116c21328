"""Segments: clipping and merging lose and invent nothing."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import ModelLayout, Span, TensorSpec
from pscore.model.sparse_slice import SparseSlice, by_tensor, entries, merge
from tests.pscore.core_makers import as_dict, layouts, numbered, segments, spans
from tests.tiers import examples

many = settings(deadline=None, max_examples=examples(100))


@st.composite
def tilings(draw, span):
    """Consecutive spans that fill a span, some of them empty."""
    cuts = sorted(draw(st.lists(st.integers(span.start, span.end), max_size=5)))
    edges = [span.start, *cuts, span.end]
    return [Span(left, right) for left, right in pairwise(edges)]


@given(st.data(), segments())
@many
def test_clip_keeps_exactly_what_lies_inside(data, segment):
    span = data.draw(spans(1400))
    part = segment.clip(span)
    inside = {index: value for index, value in as_dict(segment).items() if span.start <= index < span.end}
    if part is None:
        assert not inside
    else:
        assert as_dict(part) == inside
        assert part.span == segment.span.intersect(span)
        assert (part.offsets is None) == (segment.offsets is None)


@given(segments(min_entries=1))
@many
def test_clip_copies_no_values(segment):
    part = segment.clip(Span(segment.span.start, segment.span.end))
    assert part.values.data_ptr() == segment.values.data_ptr()


@given(st.data(), segments(min_entries=1))
@many
def test_merge_undoes_clipping(data, segment):
    parts = [part for span in data.draw(tilings(segment.span)) if (part := segment.clip(span)) is not None]
    joined = merge(segment.span, parts)
    assert as_dict(*parts) == as_dict(segment) == as_dict(joined)
    assert joined.span == segment.span
    assert (joined.offsets is None) == (segment.offsets is None)
    assert entries(parts) == segment.entries


def test_merging_one_segment_into_a_span_that_begins_with_it_copies_nothing():
    segment = SparseSlice(Span(3, 9), torch.tensor([0, 4]), numbered(2))
    joined = merge(Span(3, 20), [segment])
    assert joined.span == Span(3, 20)
    assert joined.offsets.data_ptr() == segment.offsets.data_ptr()
    assert joined.values.data_ptr() == segment.values.data_ptr()


@given(segments(min_entries=1), st.integers(0, 5), st.integers(0, 5))
@many
def test_merge_into_a_wider_span_shifts_offsets(segment, before, after):
    wider = Span(max(0, segment.span.start - before), segment.span.end + after)
    joined = merge(wider, [segment])
    assert joined.span == wider
    assert as_dict(joined) == as_dict(segment)
    if joined.offsets is not None:
        assert joined.offsets.dtype == torch.int64
        assert bool((joined.offsets.diff() > 0).all())


def test_nothing_merges_into_nothing():
    empty = SparseSlice(Span(3, 9), torch.empty(0, dtype=torch.int64), torch.empty(0))
    assert merge(Span(0, 10), []) is None
    assert merge(Span(0, 10), [empty, empty]) is None


def test_dense_neighbours_stay_dense_only_if_they_fill_the_span():
    left, right = SparseSlice(Span(0, 2), None, numbered(2)), SparseSlice(Span(2, 5), None, numbered(3))
    assert merge(Span(0, 5), [left, right]).offsets is None
    assert merge(Span(0, 6), [left, right]).offsets.tolist() == [0, 1, 2, 3, 4]


def test_dense_and_sparse_merge_into_sparse():
    left, right = SparseSlice(Span(2, 4), None, numbered(2)), SparseSlice(Span(5, 9), torch.tensor([0, 3]), numbered(2))
    assert as_dict(merge(Span(0, 10), [left, right])) == {2: 1, 3: 2, 5: 1, 8: 2}


@given(st.data(), layouts(max_tensors=12).filter(lambda layout: layout.size))
@many
def test_the_parts_by_tensor_are_those_that_clipping_finds(data, layout):
    span = data.draw(spans(layout.size))
    chosen = sorted(data.draw(st.sets(st.integers(0, max(0, span.length - 1)), max_size=span.length)))
    is_dense = data.draw(st.booleans())
    offsets = None if is_dense else torch.tensor(chosen, dtype=torch.int64)
    segment = SparseSlice(span, offsets, numbered(span.length if is_dense else len(chosen)))
    expected = [
        (position, part)
        for position, common in layout.overlapping(segment.span)
        if (part := segment.clip(common)) is not None and part.entries
    ]
    found = list(by_tensor(layout, segment))
    assert [position for position, _ in found] == [position for position, _ in expected]
    for (_, mine), (_, clipped) in zip(found, expected, strict=True):
        assert mine.span == clipped.span
        assert as_dict(mine) == as_dict(clipped)
        assert (mine.offsets is None) == (clipped.offsets is None)


def test_entries_beyond_two_and_four_thousand_million_are_found_in_their_tensors():
    sizes = {"a": 5, "big": 2**32 + 3, "z": 2**31}
    layout = ModelLayout(tuple(TensorSpec(name, (size,), torch.uint8) for name, size in sizes.items()), word_bytes=1)
    places = [4, 5, 2**31 - 1, 2**31, 2**32, 2**32 + 7, 2**32 + 8, layout.size - 1]
    segment = SparseSlice(Span(0, layout.size), torch.tensor(places), torch.arange(8, dtype=torch.uint8))
    found = [
        (position, part.span.start, part.offsets.tolist(), part.values.tolist())
        for position, part in by_tensor(layout, segment)
    ]
    assert found == [
        (0, 0, [4], [0]),
        (1, 5, [place - 5 for place in places[1:6]], [1, 2, 3, 4, 5]),
        (2, 2**32 + 8, [0, 2**31 - 1], [6, 7]),
    ]
