"""Ranges behave as the sets of integers that they stand for."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pscore.model.ranges import Ranges

pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def members(ranges):
    return {i for start, end in ranges for i in range(start, end)}


@given(pairs, pairs, st.integers(-1, 45))
def test_ranges_are_sets(left, right, count):
    a, b = Ranges(left), Ranges(right)
    ours, theirs = members(left), members(right)
    assert members(a) == ours
    assert members(a | b) == ours | theirs
    assert members(a & b) == ours & theirs
    assert members(a - b) == ours - theirs
    assert members(a.first(count)) == set(sorted(ours)[: max(0, count)])
    assert a.total == len(ours)
    assert (a == b) == (ours == theirs)
    assert bool(a) == bool(ours)
    for each in (a, a | b, a & b, a - b):
        assert all(start < end for start, end in each)
        assert all(before < after for (_, before), (after, _) in pairwise(each))
