"""What is kept in bf16 is right on average, and exact where bf16 is."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pscore.selection.host.rounding import narrowed, widened

LARGEST = torch.finfo(torch.bfloat16).max


def down(x):
    """The neighbour in bf16 that is not larger in magnitude."""
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


@given(
    arrays.arrays(np.float32, st.integers(0, 300), elements=st.floats(width=32, allow_nan=True, allow_infinity=True)),
    st.integers(0, 2**40),
)
def test_a_number_becomes_one_of_its_neighbours_and_stays_if_it_is_one(numbers, turn):
    kept = narrowed(numbers, turn)
    assert kept.dtype == np.uint16
    np.testing.assert_array_equal(narrowed(numbers, turn), kept)
    found, below = widened(kept), down(numbers)
    is_number = ~np.isnan(numbers)
    assert np.isnan(found[~is_number]).all()
    with np.errstate(over="ignore"):
        above = (below.view(np.uint32) + np.uint32(0x10000)).view(np.float32)
    exact = numbers == below
    assert ((found == below) | (~exact & (found == above)))[is_number].all()
    finite = np.isfinite(numbers)
    assert np.isfinite(found[finite]).all()
    assert (np.abs(found[finite]) <= LARGEST).all()
    np.testing.assert_array_equal(narrowed(widened(kept), turn + 1), kept)


def test_rounding_is_right_on_average():
    turns = 4096
    numbers = torch.randn(500, generator=torch.Generator().manual_seed(3)).numpy()
    mean = np.mean([widened(narrowed(numbers, turn)) for turn in range(turns)], axis=0, dtype=np.float64)
    step = np.abs(down(numbers).view(np.uint32) + np.uint32(0x10000)).view(np.float32) - down(numbers)
    assert (np.abs(mean - numbers) <= 5 * np.abs(step) / 2 / turns**0.5).all()


def test_small_steps_add_up():
    """To the nearest, 1 + 0.001 is 1 in bf16, however often."""
    kept, nearest = narrowed(np.ones(2000, np.float32), 0), torch.ones(2000, dtype=torch.bfloat16)
    for turn in range(500):
        kept = narrowed(widened(kept) + np.float32(0.001), turn)
        nearest += 0.001
    assert nearest.eq(1).all()
    np.testing.assert_allclose(widened(kept).mean(), 1.5, rtol=0.005)
