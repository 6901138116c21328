"""Adagrad by entries is that of torch, and a push of some entries is one of all, the others being zero."""

import json
from functools import partial

import pytest
import torch

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import ErrorCode, Rejected
from psservice.rules.base import PushContext
from tests.psservice.scaled_makers import SIZE, random, rule_of
from tests.psservice.scaled_makers import said as said_of
from tests.psservice.service_makers import bits

PLAIN, SLOWED = {"lr": 0.05}, {"lr": 0.05, "lr_decay": 0.1, "eps": 1e-6, "initial_accumulator_value": 0.3}
said = partial(said_of, "Adagrad")
each_kind = pytest.mark.parametrize("options", [PLAIN, SLOWED], ids=["plain", "slowed"])


def push_of(seed, density):
    """A gradient of the whole model, zero but for a share of its entries; and a push of these alone."""
    marks = torch.rand(SIZE, generator=torch.Generator().manual_seed(-seed - 1)) < density
    dense = random(seed) * marks
    offsets = marks.nonzero().view(-1)
    return dense, SparseSlice(Span(0, SIZE), offsets, dense[offsets])


@each_kind
@pytest.mark.parametrize("density", [0.01, 0.3])
def test_the_steps_are_those_of_torch(options, density):
    theta = random(0)
    home = torch.nn.Parameter(theta.clone())
    optimizer = torch.optim.Adagrad([home], **options)
    rule = rule_of(said(**options), theta)
    for step in range(1, 40):
        home.grad, push = push_of(step, density)
        optimizer.step()
        rule.apply(push)
    torch.testing.assert_close(theta, home.detach(), rtol=1e-5, atol=1e-6)
    squares = rule.export_portable().pieces[0].state["sum"]
    torch.testing.assert_close(squares, optimizer.state[home]["sum"], rtol=1e-5, atol=1e-7)


@each_kind
def test_entries_are_bit_for_bit_the_step_of_all_with_zeros(options):
    thetas = random(0), random(0)
    some, every = (rule_of(said(**options), theta) for theta in thetas)
    for step in range(1, 20):
        dense, push = push_of(step, 0.1)
        changed = some.apply(push)
        every.apply(SparseSlice(Span(0, SIZE), None, dense))
        assert changed.tolist() == push.offsets.tolist()
    assert bits(thetas[0]) == bits(thetas[1])


@each_kind
def test_a_restored_rule_and_one_of_other_borders_go_on(options):
    theta = random(0)
    rule = rule_of(said(**options), theta)
    for step in range(1, 20):
        rule.apply(push_of(step, 0.2)[1])
    copies = theta.clone(), theta.clone()
    restored, imported = (rule_of(said(**options), copy) for copy in copies)
    restored.restore(rule.export())
    assert imported.import_portable([rule.export_portable()])
    for step in range(20, 30):
        for each in (rule, restored, imported):
            each.apply(push_of(step, 0.2)[1])
    assert bits(theta) == bits(copies[0]) == bits(copies[1])


@pytest.mark.parametrize("name", ["Adagrad", "RMSprop"])
def test_a_shard_that_a_push_sends_nothing_to_counts_the_step_all_the_same(name):
    """As one shard would, which has all rows; a flush, which has no samples, is no step."""
    options = SLOWED if name == "Adagrad" else {"lr": 0.05, "alpha": 0.6}
    settings = said_of(name, **options)
    spans = Span(0, 600), Span(600, SIZE)
    whole, parts = random(0), [random(0)[span.start : span.end].clone() for span in spans]
    one = rule_of(settings, whole)
    two = [rule_of(settings, part, span) for part, span in zip(parts, spans, strict=True)]
    for step in range(1, 30):
        _, push = push_of(step, 0.1)
        side = spans[step // 10 % 2]
        here = push.clip(side)
        offsets = here.offsets + side.start
        one.apply(SparseSlice(Span(0, SIZE), offsets, here.values))
        for rule, span in zip(two, spans, strict=True):
            rule.apply(here if span == side else None)
            rule.apply(None, PushContext(samples=0))
    assert bits(torch.cat(parts)) == bits(whole)


def test_groups_have_the_rates_that_a_push_brings():
    theta = torch.zeros(SIZE)
    rule = rule_of(said([{"tensors": [0, 2]}, {"tensors": [1], "options": {"lr": 0.5}}], lr=0.1), theta)
    assert rule.rates == (0.1, 0.5)
    rule.apply(SparseSlice(Span(0, SIZE), None, torch.ones(SIZE)), PushContext(group_rates=(0.2, 0.0)))
    assert theta[:600].tolist() == pytest.approx([-0.2] * 600)
    assert not theta[600:607].any()


@pytest.mark.parametrize(
    "method_settings",
    [
        said(lr=0.1, weight_decay=0.1),
        said(lr=0.1, lr_decay=-1.0),
        said(lr=0.1, eps=0.0),
        said(lr=0.1, initial_accumulator_value=-1.0),
        said(lr=0.1, initial_accumulator_value=1e35),
        said([{"tensors": [0], "options": {"eps": 0.9}}], lr=0.1),
        {"update": "adagrad", "optimizer": json.dumps({"name": "RMSprop"})},
        {"update": "adagrad"},
    ],
)
def test_settings_that_are_not_of_the_rule_are_refused(method_settings):
    with pytest.raises(Rejected) as refusal:
        rule_of(method_settings, torch.zeros(SIZE))
    assert refusal.value.reason is ErrorCode.BAD_REQUEST
