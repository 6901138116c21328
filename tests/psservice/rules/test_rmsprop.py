"""RMSprop by entries is that of torch on gradients that are zero elsewhere, whatever is sent and wherever it is cut."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import ErrorCode, Rejected
from psservice.rules import scaled_by_squares
from psservice.rules.base import PushContext
from tests.psservice.scaled_makers import SIZE, random, rule_of
from tests.psservice.scaled_makers import said as said_of
from tests.psservice.service_makers import bits, cloned
from tests.tiers import examples

said = partial(said_of, "RMSprop")


def push_of(seed, density, span=None):
    """A push over the model, or its part in a span."""
    values, marks = random(seed), torch.rand(SIZE, generator=torch.Generator().manual_seed(-seed - 1)) < density
    span = span or Span(0, SIZE)
    values, marks = values[span.start : span.end], marks[span.start : span.end]
    if density == 1:
        return SparseSlice(span, None, values)
    offsets = marks.nonzero().view(-1)
    return SparseSlice(span, offsets, values[offsets]) if offsets.numel() else None


def dense(push):
    whole = torch.zeros(SIZE)
    whole[slice(None) if push.offsets is None else push.offsets] = push.values
    return whole


@pytest.mark.parametrize("alpha", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("density", [0.002, 0.1, 0.7, 1.0])
def test_the_steps_are_those_of_torch(alpha, density):
    """Also where the common factor has been folded into the squares: at α = 0.5 every 20 steps."""
    theta = random(0)
    home = torch.nn.Parameter(theta.clone())
    optimizer = torch.optim.RMSprop([home], lr=0.01, alpha=alpha, eps=1e-6)
    rule = rule_of(said(lr=0.01, alpha=alpha, eps=1e-6), theta)
    for step in range(1, 70):
        push = push_of(step, density)
        if push is None:
            continue
        home.grad = dense(push)
        optimizer.step()
        rule.apply(push)
    torch.testing.assert_close(theta, home.detach(), rtol=1e-4, atol=1e-5)
    squares = rule.export_portable().pieces[0].state["square_avg"]
    torch.testing.assert_close(squares, optimizer.state[home]["square_avg"], rtol=1e-4, atol=1e-9)


@given(st.integers(0, 2**16), st.sampled_from([0.05, 0.4, 1.0]), st.sampled_from([0.5, 0.99]))
@settings(deadline=None, max_examples=examples(30))
def test_the_loop_has_the_bits_of_torch_s_operations_on_a_device_and_of_python(seed, density, alpha):
    left, right = random(seed), random(seed)
    squares, others = random(seed + 1).abs(), random(seed + 1).abs()
    push = push_of(seed + 2, density)
    ends, rates = np.array([600, 607, SIZE]), np.array([0.1, 0.0, 3.0], np.float32)
    scalars = np.float32(0.3), np.float32(1 - alpha), np.float32(1e-8)
    offsets = None if push.offsets is None else push.offsets.numpy()
    third, thirds = left.clone(), squares.clone()
    assert scaled_by_squares.step_at(left.numpy(), squares.numpy(), offsets, push.values.numpy(), ends, rates, *scalars)
    assert scaled_by_squares.step_at.plain(
        third.numpy(), thirds.numpy(), offsets, push.values.numpy(), ends, rates, *scalars
    )
    assert scaled_by_squares._step_on_device(
        right, others, push.offsets, push.values, ends, rates, *map(float, scalars)
    )
    assert bits(left) == bits(right) == bits(third)
    assert bits(squares) == bits(others) == bits(thirds)


def test_only_what_is_sent_changes():
    theta = random(0)
    rule, before, push = rule_of(said(lr=0.01), theta), theta.clone(), push_of(1, 0.05)
    changed = rule.apply(push)
    assert changed.tolist() == push.offsets.tolist()
    assert not rule.densifies
    left = torch.ones(SIZE, dtype=torch.bool)
    left[push.offsets] = False
    assert torch.equal(theta[left], before[left])
    assert bool((theta[push.offsets] != before[push.offsets]).all())


def test_groups_have_the_rates_that_a_push_brings():
    theta = torch.zeros(SIZE)
    rule = rule_of(said([{"tensors": [0, 2]}, {"tensors": [1], "options": {"lr": 0.5}}], lr=0.1, alpha=0.75), theta)
    assert rule.rates == (0.1, 0.5)
    rule.apply(SparseSlice(Span(0, SIZE), None, torch.ones(SIZE)), PushContext(group_rates=(0.2, 0.0)))
    assert theta[:600].tolist() == pytest.approx([-0.4] * 600)
    assert not theta[600:607].any()


@pytest.mark.parametrize("density", [0.1, 1.0])
def test_a_restored_rule_goes_on_with_the_same_bits(density):
    theta = random(0)
    rule = rule_of(said(lr=0.01, alpha=0.6), theta)
    for step in range(1, 40):
        rule.apply(push_of(step, density))
    copy = theta.clone()
    restored = rule_of(said(lr=0.01, alpha=0.6), copy)
    restored.restore(rule.export())
    for step in range(40, 60):
        rule.apply(push_of(step, density))
        restored.apply(push_of(step, density))
    assert bits(theta) == bits(copy)


@pytest.mark.parametrize("borders", [[300, 603], [601], [1, 2, 1000]])
def test_shards_and_other_borders_have_the_state_of_one(borders):
    whole = random(0)
    one = rule_of(said(lr=0.01, alpha=0.9), whole)
    spans = [Span(start, end) for start, end in zip([0, *borders], [*borders, SIZE], strict=True)]
    parts = [random(0)[span.start : span.end].clone() for span in spans]
    rules = [rule_of(said(lr=0.01, alpha=0.9), part, span) for part, span in zip(parts, spans, strict=True)]
    for step in range(1, 12):
        one.apply(push_of(step, 1.0))
        for rule, span in zip(rules, spans, strict=True):
            rule.apply(push_of(step, 1.0, span))
    assert bits(torch.cat(parts)) == bits(whole)
    again = torch.cat(parts)
    joined = rule_of(said(lr=0.01, alpha=0.9), again)
    assert joined.import_portable([rule.export_portable() for rule in rules])
    one.apply(push_of(99, 0.3))
    joined.apply(push_of(99, 0.3))
    torch.testing.assert_close(again, whole, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e16])
@pytest.mark.parametrize("density", [0.05, 0.5, 1.0])
def test_what_would_leave_the_range_of_fp32_changes_nothing(bad, density):
    theta = random(0)
    rule, push = rule_of(said(lr=0.01), theta), push_of(1, density)
    rule.apply(push_of(2, 0.5))
    before, state = theta.clone(), cloned(rule.export())
    push.values[-1] = bad
    with pytest.raises(Rejected) as refusal:
        rule.apply(push)
    assert refusal.value.reason is ErrorCode.NON_FINITE
    assert bits(theta) == bits(before)
    assert rule.export().plain == state.plain
    assert bits(rule.export().tensors["squares"]) == bits(state.tensors["squares"])


@pytest.mark.parametrize(
    "method_settings",
    [
        said(lr=0.1, momentum=0.9),
        said(lr=0.1, weight_decay=0.1),
        said(lr=0.1, alpha=0.3),
        said(lr=0.1, alpha=1.0),
        said(lr=0.1, eps=0.0),
        said(lr=0.1, eps=1e-50),
        said(lr=-1),
        said([{"tensors": [0], "options": {"alpha": 0.9}}], lr=0.1),
        said([{"tensors": [9]}], lr=0.1),
        {"update": "rmsprop", "optimizer": json.dumps({"name": "AdamW"})},
        {"update": "rmsprop"},
    ],
)
def test_settings_that_are_not_of_the_rule_are_refused(method_settings):
    with pytest.raises(Rejected) as refusal:
        rule_of(method_settings, torch.zeros(SIZE))
    assert refusal.value.reason is ErrorCode.BAD_REQUEST
