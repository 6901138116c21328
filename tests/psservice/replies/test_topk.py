"""Selecting from a difference: tensor by tensor, and the same among what changed as among everything."""

import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import ModelLayout, Span, TensorSpec
from pscore.selection import SELECTORS
from psservice.model.changelog import ChangeLog
from psservice.replies import reply_loops
from psservice.replies.reply_loops import LINE, WORD
from psservice.replies.topk import DifferenceSelection, SelectedEntries, Sent, Table, TopKSettings, add_at
from tests.pscore.loop_makers import FORMS, run_as
from tests.tiers import examples, long_but

many = settings(deadline=None, max_examples=examples(100))


def layout_of(sizes):
    return ModelLayout(tuple(TensorSpec(f"t{i}", (size,), torch.float32) for i, size in enumerate(sizes)))


def shard(theta, layout, span, log=None):
    """What a selection reads of a shard."""
    log = log or ChangeLog(span.length, 10**9)
    return SimpleNamespace(theta=theta, layout=layout, span=span, version=0, changelog=log)


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
    taken = selection.select(shard(a, layout, span), b).taken
    assert taken.offsets.tolist() == expected
    assert torch.equal(taken.values, x[taken.offsets])


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0.005, 0.02])), min_size=1, max_size=12),
    st.sampled_from(["exact", "warm"]),
    st.sampled_from(FORMS),
    st.booleans(),
    st.integers(0, 2**16),
)
@many
def test_among_what_changed_the_largest_are_found(sizes, history, selector, form, rounded, seed):
    """Nothing that stays behind exceeds what was sent, tensor by tensor, though most tensors were never looked at."""
    layout = layout_of(sizes)
    span, generator = Span(0, layout.size), torch.Generator().manual_seed(seed)
    theta = torch.zeros(layout.size)
    image, selection = theta.clone(), DifferenceSelection(TopKSettings(0.05, 20, SELECTORS[selector]))
    log = ChangeLog(layout.size, 10**9)
    for pushes, density in history:
        for _ in range(pushes):
            support = (torch.rand(layout.size, generator=generator) < density).nonzero().view(-1)
            theta[support] += torch.randn(support.numel(), generator=generator)
            log.append(log.appended + 1, support.int())
        with run_as(form):
            selected = selection.select(shard(theta, layout, span, log), image)
            taken = selected.taken
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
        selection.commit(selected, Sent(taken, arrived))
        image[taken.offsets] += arrived


@given(st.integers(1, 300), st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(0, 2**16))
@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@many
def test_a_reply_without_entries_says_that_image_and_model_are_equal(form, often, history, seed):
    """Even if a difference was rounded in fp32, so that what an entry was sent to is not the model."""
    size = 20_000
    layout, generator = layout_of([size]), np.random.default_rng(seed)
    theta = torch.from_numpy(generator.normal(0, 0.01, size).astype(np.float32))
    image, log = theta.clone(), ChangeLog(size, 10**9)
    selection = DifferenceSelection(TopKSettings(0.05, 0, SELECTORS["warm"]))
    for pushes in history:
        for _ in range(pushes):  # the same elements again and again
            support = np.sort(generator.choice(often, min(often, 40), replace=False))
            theta.numpy()[support] -= generator.normal(0, 0.01, support.size).astype(np.float32)
            log.append(log.appended + 1, torch.from_numpy(support).int())
        for _ in range(3):
            with run_as(form):
                selected = selection.select(shard(theta, layout, Span(0, size), log), image)
            sent = selected.taken
            selection.commit(selected, Sent(sent, sent.values))
            add_at(image, sent.offsets, sent.values)
        assert not sent.offsets.numel(), "there is room for all that differs"
        assert torch.equal(image, theta)


numbers = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.5, 2.0, 2.0**-140, 2.0**127, math.inf]) | st.floats(-9, 9, width=32)


tensors = st.tuples(
    st.lists(numbers, min_size=1, max_size=30), st.integers(0, 2000), st.integers(1, 60), st.booleans(), st.booleans()
)


@given(st.lists(tensors, min_size=1, max_size=4), st.integers(0, 2**16))
@many
def test_the_compiled_selection_takes_about_the_largest_of_each_tensor(tensors, seed):
    """With ties, zeros and numbers out of all proportion, whatever is sampled, and with more than there is room for."""
    generator = np.random.default_rng(seed)
    sizes, ks = np.array([size for _, size, *_ in tensors]), np.array([k for _, _, k, *_ in tensors])
    ends = np.cumsum(sizes)
    starts = ends - sizes
    x = np.concatenate([generator.choice(np.float32(pool), size) for pool, size, *_ in tensors])
    is_tight, is_whole = np.array([[tight, whole] for *_, tight, whole in tensors]).T
    rooms = np.where(is_tight & (ks < sizes), np.minimum(sizes, ks + 2 * WORD), sizes)
    samples = np.where(is_whole, sizes, sizes // 32 * LINE)
    bounds, room = np.zeros(len(tensors), np.float32), int((1.1 * ks + 1).sum() + rooms.max())
    offsets, values = np.full(room, -1), np.full(room, np.nan, np.float32)
    nothing = np.empty(0, np.int64)
    table = (starts, ends, ks, rooms, samples, bounds)
    count = reply_loops.select(x, np.zeros_like(x), nothing, False, *table, offsets, values)
    offsets = offsets[:count]
    assert np.array_equal(values[:count], x[offsets])
    assert (np.diff(offsets) > 0).all()
    for t, k in enumerate(ks):
        part, mine = x[starts[t] : ends[t]], offsets[(offsets >= starts[t]) & (offsets < ends[t])]
        left, present = np.delete(np.abs(part), mine - starts[t]), np.count_nonzero(part)
        assert (x[mine] != 0).all()
        assert len(mine) == present if k >= len(part) else 0.9 * min(k, present) <= len(mine) <= max(1.1 * k, k)
        assert not len(mine) or left.max(initial=0) <= np.abs(x[mine]).min()
        assert left.max(initial=0) <= bounds[t] or k >= len(part)


@pytest.mark.parametrize("form", FORMS)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.sampled_from([0, 0.01, 0.5]), st.integers(0, 2**16))
@many
def test_values_that_arrived_far_from_themselves_are_searched_again(form, sizes, bound, seed):
    """Nothing that is left of a value and not noted exceeds the bound of its tensor, and exact values are not noted."""
    generator = torch.Generator().manual_seed(seed)
    table = Table(shard(None, layout_of(sizes), Span(0, sum(sizes))), TopKSettings(0.1, 0, SELECTORS["warm"]))
    table.bounds[:] = bound * np.arange(table.bounds.size)
    offsets = (torch.rand(sum(sizes), generator=generator) < 0.6).nonzero().view(-1)
    values = torch.randn(offsets.numel(), generator=generator)
    arrived = torch.where(torch.rand(values.shape, generator=generator) < 0.3, values, values.bfloat16().float())
    theta, image = torch.zeros(sum(sizes)), torch.zeros(sum(sizes))
    theta[offsets], image[offsets] = values, arrived
    with run_as(form):
        noted = table.left_of(Sent(SelectedEntries(offsets, values), arrived), theta, image).tolist()
    for offset, left in zip(offsets.tolist(), (values - arrived).abs().tolist(), strict=True):
        bound = table.bounds[np.searchsorted(table.ends, offset, "right")]
        assert offset in noted or left <= bound
        assert offset not in noted or left > 0


far_apart = st.builds(
    lambda sign, mantissa, exponent: np.float32(sign * mantissa * 2.0**exponent),
    st.sampled_from([-1, 1]),
    st.floats(1, 2, width=32),
    st.integers(-149, 60) | st.integers(-3, 3),
)


@pytest.mark.parametrize("form", FORMS)
@given(
    st.lists(st.tuples(far_apart, far_apart), min_size=1, max_size=30),
    far_apart | st.just(np.float32(0)),
    st.booleans(),
)
@many
def test_what_rounding_leaves_of_sent_values_is_searched_again(form, pairs, bound, is_rounded):
    """Whatever the magnitudes of model and image."""
    theta, image = torch.tensor(np.array(pairs, np.float32).T.copy())
    table = Table(shard(None, layout_of([theta.numel()]), Span(0, theta.numel())), TopKSettings(0.1, 0, None))
    table.bounds[:] = abs(bound)
    values = theta - image
    arrived = values.bfloat16().float() if is_rounded else values
    image += arrived
    sent = Sent(SelectedEntries(torch.arange(theta.numel()), values), arrived)
    with run_as(form):
        noted = table.left_of(sent, theta, image)
    assert torch.equal(noted, ((theta - image).abs() > abs(bound)).nonzero().view(-1))


def test_parameters_may_change_under_a_selection():
    """The entries are of a time in between, ascending and no more than there is room for."""
    layout = layout_of([40_000, 50, 20_000])
    theta, image = torch.randn(layout.size), torch.zeros(layout.size)
    selection = DifferenceSelection(TopKSettings(0.01, 100, SELECTORS["warm"]))
    ended = threading.Event()

    def change():
        generator = np.random.default_rng(0)
        while not ended.is_set():
            theta.numpy()[:] = generator.standard_normal(layout.size, np.float32) * generator.choice([0.01, 1, 100])

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(200):
            selected = selection.select(shard(theta, layout, Span(0, layout.size)), image)
            taken = selected.taken
            selection.commit(selected, Sent(taken, taken.values))
            assert bool((taken.offsets.diff() > 0).all())
            assert taken.offsets.numel() <= 1.1 * 600 + 50
            assert bool((taken.offsets < layout.size).all())
            assert bool(taken.values.isfinite().all())
    finally:
        ended.set()
        changing.join()


def test_few_changes_are_looked_at_alone_and_many_are_not():
    """What the log does not name is seen by a selection among everything only."""
    layout = layout_of([20_000, 5_000])
    log = ChangeLog(layout.size, 10**9)
    theta, image = torch.randn(layout.size), torch.zeros(layout.size)
    selection = DifferenceSelection(TopKSettings(0.01, 0, SELECTORS["warm"]))

    not_named = iter(range(1, 50))  # each once: what was sent is looked at again

    def finds_what_is_not_named(changed):
        if changed is not None:
            theta[changed.long()] += 10
        secret = next(not_named)
        theta[secret] += 100
        log.append(log.appended + 1, changed)
        selected = selection.select(shard(theta, layout, Span(0, layout.size), log), image)
        taken = selected.taken
        selection.commit(selected, Sent(taken, taken.values))
        image[taken.offsets] += taken.values
        return secret in taken.offsets.tolist()

    assert finds_what_is_not_named(None)
    assert not finds_what_is_not_named(torch.arange(50, layout.size, 50).int())
    assert finds_what_is_not_named(None)
    assert finds_what_is_not_named(torch.arange(8, layout.size).int())
    assert finds_what_is_not_named(torch.empty(0).int()), "nothing exceeds the bound, so it must fall"
    other, log = log, ChangeLog(layout.size, 10**9)
    for _ in range(other.appended):
        log.append(log.appended + 1, torch.empty(0).int())
    assert finds_what_is_not_named(torch.arange(50, layout.size, 50).int()), "another model's log says nothing"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", long_but(["int4"], ["fp32", "int4"]))
def test_without_further_pushes_everything_arrives(value, form):
    from pscore.wire.codecs.names import VALUE_CODECS
    from pscore.wire.codecs.values import VALUE_FORMATS

    layout = layout_of([3_000, 100])
    theta, image = torch.randn(3_100), torch.zeros(3_100)
    selection = DifferenceSelection(TopKSettings(0.05, 200, SELECTORS["warm"]))
    log = ChangeLog(layout.size, 10**9)
    for _ in range(400):
        with run_as(form):
            selected = selection.select(shard(theta, layout, Span(0, 3_100), log), image)
            taken = selected.taken
        arrived = torch.from_numpy(VALUE_FORMATS[VALUE_CODECS[value]].encode(taken.values.numpy())[1].copy())
        selection.commit(selected, Sent(taken, arrived))
        image[taken.offsets] += arrived
    torch.testing.assert_close(image, theta, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("form", FORMS)
def test_an_image_grows_by_what_was_sent(form):
    image, values = torch.randn(1000), torch.randn(300)
    offsets = torch.randperm(1000)[:300].sort().values
    expected = image.clone().index_put_((offsets,), image[offsets] + values)
    with run_as(form):
        add_at(image, offsets, values)
    assert torch.equal(image, expected)
