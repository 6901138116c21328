"""Speeds are measured, and DC-ASGD's compensation is the paper's; the books of both."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from psservice.model.parameters import ModelShard
from psservice.model.training_mode import TrainingMode
from psservice.model.undo_log import Overwritten, UndoLog
from psservice.rules.base import PushContext
from psservice.settings import ShardSettings
from psservice.shard.push import prepare_push
from tests.psservice.service_makers import F32, bits, layout_of, sparse_push
from tests.psservice.shard_makers import (
    ANNA,
    BERT,
    join,
    push,
    push_of,
    serving,
    theta,
    with_clock,
)

LAYOUT = layout_of((8, F32))


def test_speeds_are_measured_between_pushes():
    with serving(LAYOUT, torch.zeros(8)) as shard:
        join(shard, LAYOUT, BERT)
        clock = with_clock(shard)
        steps = {ANNA: 0, BERT: 0}
        for tick in range(1, 41):
            clock.now = float(tick)
            for who, period in ((ANNA, 1), (BERT, 4)):
                if tick % period == 0:
                    steps[who] += 1
                    push(shard, steps[who], {0: 1.0}, who, base=shard.model.version)
        seconds = {member.identity: member.interval_seconds for member in shard.leases.members()}
        assert seconds == {ANNA: pytest.approx(1.0), BERT: pytest.approx(4.0)}


def shard(strength, ledger_multiple=100.0, size=8):
    return ModelShard(
        layout_of((size, F32)),
        Span(0, size),
        torch.linspace(-1, 1, size),
        generation=1,
        version=0,
        settings=ShardSettings(ledger_multiple, strength),
        mode=TrainingMode(),
    )


def test_compensation_is_the_papers_formula_on_what_was_sent():
    strength, lr = 0.04, 0.1
    model = shard(strength)
    base = model.theta.clone()
    model.take("anna", SparseSlice(Span(0, 8), torch.tensor([1, 4]), torch.tensor([0.5, -0.5])))
    model.take("anna", SparseSlice(Span(0, 8), None, torch.full((8,), 0.25)))
    now = model.theta.clone()
    p = torch.tensor([0.3, -0.2, 0.1])
    offsets = torch.tensor([0, 1, 4])
    model.take("bert", SparseSlice(Span(0, 8), offsets, p), PushContext(0, lr))
    g = p / lr
    expected = now.clone()
    expected[offsets] -= lr * (g + strength * g * g * (now - base)[offsets])
    torch.testing.assert_close(model.theta, expected)


def test_a_fresh_push_and_one_of_unknown_rate_are_not_compensated():
    for correction in (PushContext(1, 0.1), PushContext(0, 0.0), PushContext(None, 0.1)):
        model, plain = shard(0.5), shard(0.0)
        for each in (model, plain):
            each.take("anna", SparseSlice(Span(0, 8), None, torch.ones(8)))
            each.take("bert", SparseSlice(Span(0, 8), None, torch.ones(8)), correction)
        assert bits(model.theta) == bits(plain.theta)


def test_a_base_that_is_forgotten_leaves_the_push_as_it_came():
    model, plain = shard(0.5, ledger_multiple=1.0), shard(0.0)
    for each in (model, plain):
        for _ in range(5):
            each.take("anna", SparseSlice(Span(0, 8), None, torch.ones(8)))
        each.take("bert", SparseSlice(Span(0, 8), None, torch.ones(8)), PushContext(0, 0.1))
    assert bits(model.theta) == bits(plain.theta)


def test_what_would_not_be_finite_is_not_compensated():
    model = shard(0.5)
    model.take("anna", SparseSlice(Span(0, 8), torch.tensor([2]), torch.tensor([1e30])))
    model.take("bert", SparseSlice(Span(0, 8), torch.tensor([2]), torch.tensor([1e10])), PushContext(0, 1e-9))
    assert bool(model.theta.isfinite().all())


@given(
    densities=st.lists(st.sampled_from([0.0, 0.1, 0.5, None]), max_size=8),
    back=st.integers(0, 8),
    asked=st.sampled_from([(3, 7), tuple(range(30)), None]),
    seed=st.integers(0, 999),
)
@settings(deadline=None)
def test_past_values_are_what_they_were(densities, back, asked, seed):
    size = 30
    span = Span(0, size)
    model = shard(0.1, size=size)
    history = [model.theta.clone()]
    for number, density in enumerate(densities):
        whole = SparseSlice(span, None, torch.randn(size, generator=torch.Generator().manual_seed(seed + number)))
        model.take("anna", whole if density is None else sparse_push(span, density, seed + number))
        history.append(model.theta.clone())
    version = max(0, model.version - back)
    offsets = None if asked is None else torch.tensor(asked)
    found = model._undo_log.at(model.theta, version, model.version, offsets)
    expected = history[version] if offsets is None else history[version][offsets]
    assert bits(found) == bits(expected)


def test_past_values_stay_within_their_limit():
    past = UndoLog(10)
    model = shard(0.1, ledger_multiple=2.0)
    for _ in range(20):
        model.take("anna", SparseSlice(Span(0, 8), torch.tensor([1, 2, 3]), torch.ones(3)))
    assert model._undo_log._entries <= 16
    assert past.at(torch.zeros(3), 0, 0, None) is not None


def test_an_engine_compensates_by_the_rate_that_the_push_carries():
    with serving(LAYOUT, torch.zeros(8), delay_compensation=1.0) as shard:
        push(shard, 1, {0: 1.0})
        offsets, values = torch.tensor([0]), torch.tensor([0.5])
        stale = push_of(ANNA, 2, shard.model.generation, 0, 1, [SparseSlice(shard.span, offsets, values)], 0.25)
        shard.apply_thread.run(prepare_push(shard, *stale))
        assert theta(shard)[0] == -1.0 - (0.5 + (1.0 / 0.25) * 0.25 * -1.0)


def test_pushes_of_nothing_are_not_remembered_for_ever():
    past = UndoLog(8)
    for version in range(1, 20_001):
        past.append(Overwritten(version, torch.empty(0, dtype=torch.int32), torch.empty(0)))
    assert len(past.export().plain["versions"]) == 10_000
    theta = torch.zeros(4)
    assert past.at(theta, 10_000, 20_000, None) is not None
    assert past.at(theta, 9_999, 20_000, None) is None
