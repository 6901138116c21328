"""The order of an epoch: a permutation, the same everywhere, another one each epoch."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psclient.data.permutation import shuffled

GOLDEN_SMALL = [2, 7, 0, 9, 1, 6, 8, 4, 3, 5]
GOLDEN_LARGE = [419200, 761731, 681192, 1124649, 931766]


@given(size=st.integers(1, 3000), seed=st.integers(0, (1 << 64) - 1), epoch=st.integers(0, 1 << 32))
def test_every_sample_is_at_one_place(size, seed, epoch):
    assert sorted(shuffled(size, seed, epoch, 0, size)) == list(range(size))


@given(size=st.integers(1, 1 << 48), data=st.data())
def test_a_part_needs_no_whole(size, data):
    start = data.draw(st.integers(0, size - 1))
    end = data.draw(st.integers(start, min(size, start + 50)))
    found = shuffled(size, 5, 0, start, end)
    assert len(set(found)) == end - start
    assert all(0 <= sample < size for sample in found)
    assert found == [sample for place in range(start, end) for sample in shuffled(size, 5, 0, place, place + 1)]


def test_the_order_is_what_it_was():
    """Workers of other versions must compute the same; a change of these numbers is a change of the protocol."""
    assert shuffled(10, 0, 0, 0, 10) == GOLDEN_SMALL
    assert shuffled(1_281_167, 7, 3, 1000, 1005) == GOLDEN_LARGE


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(shuffled(50, seed, epoch, 0, 50)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


@pytest.mark.parametrize("size", [7, 64, 1000])
def test_samples_are_spread_evenly_over_places(size):
    """Chi-square over (place, sample) in eight by eight boxes; mean 49, and 5 standard deviations above it 98."""
    epochs = 400
    boxes = Counter(
        (place * 8 // size, sample * 8 // size)
        for epoch in range(epochs)
        for place, sample in enumerate(shuffled(size, 1, epoch, 0, size))
    )
    widths = Counter(i * 8 // size for i in range(size))
    chi_square = sum(
        (boxes[a, b] - (expected := epochs * widths[a] * widths[b] / size)) ** 2 / expected
        for a in widths
        for b in widths
    )
    assert chi_square < 98
