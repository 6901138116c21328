"""Selectors: which entries go, checked against a sort."""

import math

import pytest
import torch
from core_makers import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.layout import ModelLayout, Span, TensorSpec
from pscore.selection import DEFAULT_DENSE_BELOW, select, select_span
from pscore.selectors import SELECTORS, entries_for
from pscore.selectors.exact import exact

many = settings(deadline=None, max_examples=200)

# Few distinct magnitudes, so that ties, zeros and signed zeros are the rule.
tied = st.lists(st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.0, 1e-30, -3e38]), max_size=60)
spread = st.lists(st.floats(-1e6, 1e6, width=32), max_size=60)


def slow_top(x, k):
    """The k largest magnitudes, ties to the lowest index, zeros never; ascending."""
    order = sorted(range(len(x)), key=lambda i: (-abs(x[i]), i))
    return sorted(i for i in order[:k] if x[i] != 0)


@given(tied | spread, st.integers(1, 80))
@many
def test_exact_is_the_sorted_top_k(x, k):
    assert exact(torch.tensor(x), k).tolist() == slow_top(x, k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(st.lists(st.integers(-100, 100), max_size=60), st.integers(1, 80))
@settings(deadline=None, max_examples=50)
def test_exact_takes_every_dtype(dtype, x, k):
    assert exact(torch.tensor(x, dtype=dtype), k).tolist() == slow_top(x, k)


@pytest.mark.parametrize("name", SELECTORS)
@given(tied | spread, st.integers(1, 80))
@many
def test_every_selector_is_sorted_bounded_deterministic_and_skips_zeros(name, x, k):
    x = torch.tensor(x)
    before = x.clone()
    chosen = SELECTORS[name](x, k)
    assert chosen.dtype == torch.int64
    assert chosen.numel() <= k
    assert bool((chosen.diff() > 0).all())
    assert bool((x[chosen] != 0).all())
    assert torch.equal(chosen, SELECTORS[name](x, k))
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("x", [torch.empty(0), torch.zeros(1), torch.zeros(50)], ids=["empty", "one", "many"])
def test_nothing_is_selected_from_nothing(name, x):
    assert SELECTORS[name](x, max(1, x.numel())).numel() == 0
    assert SELECTORS[name](x, 1).numel() == 0


@given(st.integers(0, 10**7), st.floats(1e-4, 1))
@many
def test_entries_are_the_floor_of_the_share_and_at_least_one(numel, density):
    k = entries_for(numel, density)
    assert k == (min(numel, max(1, math.floor(density * numel))) if numel else 0)


def test_even_one_element_is_updated():
    assert entries_for(1, 0.001) == 1
    assert select(torch.tensor([0.5]), 0.001, 0, exact).tolist() == [0]


def test_small_tensors_go_whole_and_large_ones_do_not():
    x = torch.arange(1.0, 101.0)
    assert select(x, 0.01, 101, exact).numel() == 100
    assert select(x, 0.01, 100, exact).tolist() == [99]
    assert DEFAULT_DENSE_BELOW == 4096


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=5),
    st.tuples(st.integers(0, 150), st.integers(0, 150)),
    st.sampled_from([0.01, 0.1, 0.5, 1.0]),
    st.sampled_from([0, 10]),
    st.integers(0, 2**16),
)
@many
def test_a_span_is_selected_from_tensor_by_tensor(sizes, cut, density, dense_below, seed):
    layout = ModelLayout(tuple(TensorSpec(f"t{i}", (size,), torch.float32) for i, size in enumerate(sizes)))
    start, end = sorted(min(c, layout.size) for c in cut)
    span = Span(start, end)
    x = torch.randn(span.length, generator=torch.Generator().manual_seed(seed))
    expected = []
    for position in range(len(sizes)):
        common = layout.span(position).intersect(span)
        if common.length:
            low = common.start - start
            part = x[low : low + common.length]
            k = common.length if common.length < dense_below else max(1, math.floor(density * common.length))
            expected += [low + i for i in slow_top(part.tolist(), k)]
    assert select_span(x, layout, span, density, dense_below, exact).tolist() == expected
