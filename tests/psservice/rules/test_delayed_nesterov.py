"""Delayed Nesterov: the paper's recurrence, whatever is sent; restored, resharded, and named in words only."""

import json

import pytest
import torch

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import ErrorCode, Rejected
from psservice.model.training_mode import TrainingMode
from tests.psservice.service_makers import F32, bits, layout_of

LAYOUT = layout_of((60, F32), (40, F32))
SIZE = LAYOUT.size


def said(**options):
    return {"update": "delayed_nesterov", "optimizer": json.dumps({"name": "DelayedNesterov", "options": options})}


def rule_of(theta, span=None, **options):
    return TrainingMode.of(said(**({"lr": 0.7, "momentum": 0.9, "every": 3} | options))).rule(
        LAYOUT, span or Span(0, SIZE), theta
    )


def push_of(seed, density, span=None):
    generator = torch.Generator().manual_seed(seed)
    values, marks = torch.randn(SIZE, generator=generator), torch.rand(SIZE, generator=generator) < density
    span = span or Span(0, SIZE)
    values, offsets = values[span.start : span.end], marks[span.start : span.end].nonzero().view(-1)
    return SparseSlice(span, None, values) if density == 1 else SparseSlice(span, offsets, values[offsets])


@pytest.mark.parametrize("density", [0.2, 1.0])
@pytest.mark.parametrize("every", [1, 3])
def test_the_steps_are_those_of_the_paper(density, every):
    theta = torch.randn(SIZE)
    rule, lr, beta = rule_of(theta, every=every), 0.7, 0.9
    x, m, d = theta.double(), torch.zeros(SIZE).double(), torch.zeros(SIZE).double()
    for step in range(1, 14):
        push = push_of(step, density)
        changed = rule.apply(push)
        s = torch.zeros(SIZE).double()
        s[slice(None) if push.offsets is None else push.offsets] = push.values.double()
        d, x = d + s, x - lr * s / every
        if step % every == 0:
            m = beta * m + d / every
            x, d = x - lr * beta * m, torch.zeros(SIZE).double()
            assert changed is None or changed.numel() == SIZE
        elif density < 1:
            assert changed.tolist() == push.offsets.tolist()
    torch.testing.assert_close(theta.double(), x, rtol=1e-5, atol=1e-5)


def test_with_every_1_it_is_torch_s_nesterov_momentum():
    theta = torch.randn(SIZE)
    home = torch.nn.Parameter(theta.clone())
    local = torch.optim.SGD([home], lr=0.7, momentum=0.9, nesterov=True)
    rule = rule_of(theta, every=1)
    for step in range(8):
        push = push_of(step, 1.0)
        home.grad = push.values
        local.step()
        rule.apply(push)
    torch.testing.assert_close(theta, home.detach(), rtol=1e-4, atol=1e-5)


def test_a_restored_rule_goes_on_with_the_same_bits():
    theta = torch.randn(SIZE)
    rule = rule_of(theta)
    for step in range(7):
        rule.apply(push_of(step, 0.3))
    copy = theta.clone()
    restored = rule_of(copy)
    restored.restore(rule.export())
    for step in range(7, 12):
        rule.apply(push_of(step, 0.3))
        restored.apply(push_of(step, 0.3))
    assert bits(theta) == bits(copy)


def test_shards_and_other_borders_have_the_state_of_one():
    whole = torch.randn(SIZE)
    spans = [Span(0, 33), Span(33, SIZE)]
    parts = [whole[span.start : span.end].clone() for span in spans]
    one, rules = rule_of(whole), [rule_of(part, span) for part, span in zip(parts, spans, strict=True)]
    for step in range(7):
        one.apply(push_of(step, 1.0))
        for rule, span in zip(rules, spans, strict=True):
            rule.apply(push_of(step, 1.0, span))
    again = torch.cat(parts)
    assert bits(again) == bits(whole)
    joined = rule_of(again)
    assert joined.import_portable([rule.export_portable() for rule in rules])
    for step in range(7, 12):
        one.apply(push_of(step, 0.3))
        joined.apply(push_of(step, 0.3))
    assert bits(again) == bits(whole)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_what_would_leave_the_range_of_fp32_changes_nothing(every, bad):
    theta = torch.full((SIZE,), -3e38)
    rule, push = rule_of(theta, every=every, lr=10.0), push_of(1, 0.5)
    push.values[0] = bad
    with pytest.raises(Rejected) as refusal:
        rule.apply(push)
    assert refusal.value.reason is ErrorCode.NON_FINITE
    assert bool((theta == -3e38).all())
    assert not any(tensor.any() for tensor in rule.export().tensors.values())


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1},
        {"lr": float("nan")},
        {"lr": "x"},
        {"momentum": 1.0},
        {"every": 0},
        {"every": 1.5},
        {"every": 1e300},
        {"every": None},
        {"nesterov": True},
    ],
)
def test_settings_out_of_range_are_refused(options):
    with pytest.raises(Rejected) as refusal:
        rule_of(torch.zeros(SIZE), **options)
    assert refusal.value.reason is ErrorCode.BAD_REQUEST


@pytest.mark.parametrize("text", ["", "{", "[]", '{"options": 3}', '{"options": {}}', "null"])
def test_words_that_are_none_are_refused(text):
    with pytest.raises(Rejected):
        TrainingMode.of({"update": "delayed_nesterov", "optimizer": text})
