"""Selecting from a difference: tensor by tensor, and the same among what changed as among everything."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import ModelLayout, Span, TensorSpec
from pscore.select import SELECTORS
from psservice.model.topk import DifferenceSelection, TopKSettings

many = settings(deadline=None, max_examples=100)


def layout_of(sizes):
    return ModelLayout(tuple(TensorSpec(f"t{i}", (size,), torch.float32) for i, size in enumerate(sizes)))


def shard(theta, layout, span, version=1, changed=None):
    """What a selection reads of a shard; ``changed`` since the selection before."""
    return SimpleNamespace(
        theta=theta, layout=layout, span=span, version=version, changelog=SimpleNamespace(since=lambda version: changed)
    )


def slow_top(x, k):
    order = sorted(range(len(x)), key=lambda i: (-abs(x[i]), i))
    return sorted(i for i in order[:k] if x[i] != 0)


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=5),
    st.tuples(st.integers(0, 150), st.integers(0, 150)),
    st.sampled_from([0.01, 0.1, 0.5, 1.0]),
    st.sampled_from([0, 10]),
    st.integers(0, 2**16),
)
@many
def test_each_tensor_of_a_span_is_selected_from_by_itself(sizes, cut, density, dense_below, seed):
    layout = layout_of(sizes)
    start, end = sorted(min(c, layout.size) for c in cut)
    span = Span(start, end)
    a, b = torch.randn(2, span.length, generator=torch.Generator().manual_seed(seed))
    x, expected = a - b, []
    for position in range(len(sizes)):
        common = layout.span(position).intersect(span)
        if common.length:
            low = common.start - start
            part = x[low : low + common.length]
            k = common.length if common.length < dense_below else max(1, math.floor(density * common.length))
            expected += [low + i for i in slow_top(part.tolist(), k)]
    selection = DifferenceSelection(TopKSettings(density, dense_below, SELECTORS["exact"]))
    _, taken = selection.select(shard(a, layout, span), b)
    assert taken.offsets.tolist() == expected
    assert torch.equal(taken.values, x[taken.offsets])


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0.005, 0.02])), min_size=1, max_size=12),
    st.sampled_from(["exact", "warm"]),
    st.booleans(),
    st.integers(0, 2**16),
)
@many
def test_among_what_changed_the_largest_are_found(sizes, history, selector, rounded, seed):
    """Nothing that stays behind exceeds what was sent, tensor by tensor, though most tensors were never looked at."""
    layout = layout_of(sizes)
    span, generator = Span(0, layout.size), torch.Generator().manual_seed(seed)
    theta = torch.zeros(layout.size)
    image, selection = theta.clone(), DifferenceSelection(TopKSettings(0.05, 20, SELECTORS[selector]))
    version, supports = 0, None
    for pushes, density in history:
        for _ in range(pushes):
            support = (torch.rand(layout.size, generator=generator) < density).nonzero().view(-1)
            theta[support] += torch.randn(support.numel(), generator=generator)
            version += 1
            if supports is not None:
                supports.append(support.int())
        _, taken = selection.select(shard(theta, layout, span, version, supports), image)
        supports = []
        difference = theta - image
        assert torch.equal(taken.values, difference[taken.offsets])
        assert bool((taken.offsets.diff() > 0).all())
        left = difference.clone()
        left[taken.offsets] = 0
        for position, size in enumerate(sizes):
            part = layout.span(position)
            mine = (taken.offsets >= part.start) & (taken.offsets < part.end)
            stays = left[part.start : part.end].abs().max()
            if size < 20:
                assert stays == 0
            elif bool(mine.any()):
                assert stays <= taken.values[mine].abs().min()
        arrived = taken.values.bfloat16().float() if rounded else taken.values
        selection.sent(taken, arrived)
        image[taken.offsets] += arrived


def test_few_changes_are_looked_at_alone_and_many_are_not(monkeypatch):
    layout = layout_of([10_000, 5_000])
    theta, image = torch.randn(15_000), torch.zeros(15_000)
    selection = DifferenceSelection(TopKSettings(0.01, 0, SELECTORS["warm"]))

    def select(version, changed):
        _, taken = selection.select(shard(theta, layout, Span(0, 15_000), version, changed), image)
        image[taken.offsets] += taken.values
        selection.sent(taken, taken.values)
        return searched_whole.pop()

    search_whole, searched_whole = DifferenceSelection._from_all, []

    def counted(selection, theta, image, spans):
        searched_whole.append(len(spans))
        return search_whole(selection, theta, image, spans)

    monkeypatch.setattr(DifferenceSelection, "_from_all", counted)
    assert select(1, None) == 2
    support = torch.arange(0, 15_000, 50)
    theta[support] += 10
    assert select(2, [support.int()]) == 0
    assert select(3, [None]) == 2
    assert select(4, [torch.arange(15_000)]) == 2
    assert select(5, []) == 2, "nothing exceeds the bound, so it must fall"


@pytest.mark.parametrize("value", ["fp32", "int4"])
def test_without_further_pushes_everything_arrives(value):
    from pscore.wire.codecs.names import VALUE_CODECS
    from pscore.wire.codecs.values import VALUE_FORMATS

    layout = layout_of([3_000, 100])
    theta, image = torch.randn(3_100), torch.zeros(3_100)
    selection = DifferenceSelection(TopKSettings(0.05, 200, SELECTORS["warm"]))
    for version in range(400):
        _, taken = selection.select(shard(theta, layout, Span(0, 3_100), version, []), image)
        arrived = torch.from_numpy(VALUE_FORMATS[VALUE_CODECS[value]].encode(taken.values.numpy())[1].copy())
        selection.sent(taken, arrived)
        image[taken.offsets] += arrived
    torch.testing.assert_close(image, theta, rtol=1e-3, atol=1e-3)
