"""Dense segments are moved to one place, and joined there without a copy; others are joined as ever."""

import torch

from pscore.model.dense_place import DensePlace
from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice

SPAN = Span(100, 10_100)


def dense(start, end):
    return SparseSlice(Span(start, end), None, torch.arange(start, end, dtype=torch.float32))


def place_in(made):
    def make():
        made.append(torch.full((SPAN.length,), -1.0))
        return made[-1]

    return DensePlace(SPAN, make)


def test_dense_segments_become_one_without_another_copy():
    made = []
    place = place_in(made)
    segments = [place.moved(each) for each in (dense(100, 5_000), dense(5_000, 5_003), dense(5_003, 10_100))]
    whole = place.joined(segments)
    assert (whole.span, whole.offsets) == (SPAN, None)
    assert whole.values.tolist() == list(range(100, 10_100))
    assert [whole.values.data_ptr()] == [each.data_ptr() for each in made]


def test_a_gap_and_sparse_entries_are_joined_as_ever():
    made = []
    place = place_in(made)
    sparse = SparseSlice(Span(6_000, 6_010), torch.tensor([2, 5]), torch.tensor([7.0, 8.0]))
    joined = place.joined([place.moved(each) for each in (dense(100, 4_000), sparse)])
    assert joined.offsets.tolist() == [*range(3_900), 5_902, 5_905]
    assert joined.values.tolist() == [*range(100, 4_000), 7, 8]
    only = place.joined([place.moved(dense(200, 4_000))])
    assert (only.offsets[0], only.entries) == (100, 3_800)


def test_small_and_sparse_segments_need_no_place_and_without_one_all_stay_where_they_are():
    made = []
    place = place_in(made)
    small, sparse = dense(100, 110), SparseSlice(Span(200, 210), torch.tensor([0]), torch.tensor([1.0]))
    assert place.moved(small) is small
    assert place.moved(sparse) is sparse
    assert made == []
    large = dense(100, 10_100)
    assert DensePlace(SPAN, lambda: None).moved(large) is large


def test_nothing_is_joined_to_nothing():
    assert place_in([]).joined([]) is None
