"""The server's optimizer is torch.optim's, dense or lazy, whole or in shards; and it is named in words only."""

import json
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import ErrorCode, Rejected
from psservice.model.training_mode import TrainingMode
from psservice.replies.reply_session import ReplyMode
from psservice.rules.optimizer_settings import ELEMENTWISE, LAZY, optimizers, schedulers
from tests.psservice.service_makers import F32, bits, cloned, layout_of
from tests.psservice.shard_makers import ANNA, join, open_shards, pull, push, theta, upload
from tests.tiers import examples

LAYOUT = layout_of(((3, 4), F32), (5, F32), ((2, 2), F32))
SHAPES = [spec.shape for spec in LAYOUT.parameters]
NEEDS_MATRICES = {"Muon"}


def said(name, scheduler=None, groups=None, lazy=False, **options):
    found = {"update": "torch", "optimizer": json.dumps({"name": name, "options": options})}
    if scheduler is not None:
        found["scheduler"] = json.dumps(scheduler)
    if groups is not None:
        found["groups"] = json.dumps(groups)
    return found | ({"lazy": "true"} if lazy else {})


def rule(settings, values, span=None, layout=LAYOUT):
    span = span or Span(0, layout.size)
    theta = values[span.start : span.end].clone()
    return TrainingMode.of(settings).rule(layout, span, theta), theta


def some_values(seed=0, size=LAYOUT.size):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def local(values, shapes=SHAPES):
    """The same values as a model's parameters."""
    return [
        torch.nn.Parameter(part.clone().view(shape))
        for part, shape in zip(values.split([torch.Size(s).numel() for s in shapes]), shapes, strict=True)
    ]


def local_step(optimizer, parameters, gradient):
    for parameter, part in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.clone().view(parameter.shape)
    optimizer.step()


def flat(parameters):
    return torch.cat([parameter.detach().view(-1) for parameter in parameters])


def refused(call, *arguments):
    """Why a call is refused; ``None`` where it is not."""
    try:
        call(*arguments)
    except Rejected as refusal:
        return refusal.reason
    return None


def dense(values):
    return SparseSlice(Span(0, values.numel()), None, values)


@pytest.mark.parametrize("name", sorted({*optimizers()} - NEEDS_MATRICES))
def test_every_optimizer_takes_torchs_own_steps_bit_for_bit(name):
    server, theta = rule(said(name), some_values())
    parameters = local(some_values())
    optimizer = optimizers()[name](parameters)
    for step in range(6):
        gradient = some_values(step + 1)
        assert server.apply(dense(gradient)) is None
        local_step(optimizer, parameters, gradient)
        assert bits(theta) == bits(flat(parameters))


def test_an_optimizer_for_matrices_takes_a_model_of_matrices():
    layout = layout_of(((3, 4), F32), ((2, 2), F32))
    server, theta = rule(said("Muon", lr=0.01), some_values(size=16), layout=layout)
    parameters = local(some_values(size=16), [(3, 4), (2, 2)])
    optimizer = torch.optim.Muon(parameters, lr=0.01)
    for step in range(3):
        server.apply(dense(some_values(step + 1, 16)))
        local_step(optimizer, parameters, some_values(step + 1, 16))
    assert bits(theta) == bits(flat(parameters))
    with pytest.raises(Rejected) as refused:
        rule(said("Muon"), some_values())
    assert refused.value.reason is ErrorCode.BAD_REQUEST


SCHEDULES = {
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2, 4]},
    "ConstantLR": {},
    "LinearLR": {},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {},
    "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 20},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_scheduler_drives_the_rate_as_it_does_at_home(name):
    options = SCHEDULES[name]
    server, theta = rule(said("SGD", {"name": name, "options": options}, lr=0.1, momentum=0.5), some_values())
    parameters = local(some_values())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.5)
    scheduler = schedulers()[name](optimizer, **options)
    for step in range(8):
        server.apply(dense(some_values(step + 1)))
        local_step(optimizer, parameters, some_values(step + 1))
        scheduler.step()
        assert bits(theta) == bits(flat(parameters))


def test_schedulers_that_need_no_code_are_all_tried():
    assert {*SCHEDULES, "ChainedScheduler", "SequentialLR"} == {*schedulers()}


@pytest.mark.parametrize(
    ("spec", "make"),
    [
        (
            {
                "name": "SequentialLR",
                "options": {"milestones": [3]},
                "schedulers": [
                    {"name": "LinearLR", "options": {"total_iters": 3}},
                    {"name": "ExponentialLR", "options": {"gamma": 0.5}},
                ],
            },
            lambda optimizer, inner: torch.optim.lr_scheduler.SequentialLR(optimizer, inner, [3]),
        ),
        (
            {
                "name": "ChainedScheduler",
                "schedulers": [
                    {"name": "LinearLR", "options": {"total_iters": 3}},
                    {"name": "ExponentialLR", "options": {"gamma": 0.5}},
                ],
            },
            lambda optimizer, inner: torch.optim.lr_scheduler.ChainedScheduler(inner),
        ),
    ],
)
def test_schedulers_inside_schedulers(spec, make):
    server, theta = rule(said("SGD", spec, lr=0.1), some_values())
    parameters = local(some_values())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    inner = [
        torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3),
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    ]
    scheduler = make(optimizer, inner)
    for step in range(8):
        server.apply(dense(some_values(step + 1)))
        local_step(optimizer, parameters, some_values(step + 1))
        scheduler.step()
    assert bits(theta) == bits(flat(parameters))


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_cut_into_shards_it_does_the_same(name):
    whole, theta = rule(said(name), some_values())
    spans = LAYOUT.shard_spans(3)
    parts = [rule(said(name), some_values(), span) for span in spans]
    for step in range(4):
        gradient = dense(some_values(step + 1))
        whole.apply(gradient)
        for span, (part, _) in zip(spans, parts, strict=True):
            part.apply(gradient.clip(span))
    assert bits(torch.cat([cut for _, cut in parts])) == bits(theta)


def test_one_that_looks_at_whole_tensors_refuses_cut_ones():
    with pytest.raises(Rejected) as refused:
        rule(said("Adafactor"), some_values(), Span(0, 6))
    assert refused.value.reason is ErrorCode.BAD_REQUEST
    assert "one shard" in str(refused.value)


@pytest.mark.parametrize("name", sorted(LAZY))
@given(
    masks=st.lists(
        st.lists(st.booleans(), min_size=LAYOUT.size, max_size=LAYOUT.size).map(torch.tensor), min_size=1, max_size=5
    )
)
@settings(deadline=None, max_examples=examples(15))
def test_lazy_steps_change_what_was_sent_and_nothing_else(name, masks):
    """With every entry sent it is the plain optimizer; entries that are never sent keep their value and no state."""
    options = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    server, theta = rule(said(name, lazy=True, **options), some_values())
    never = ~torch.stack(masks).any(0)
    for step, mask in enumerate(masks):
        offsets = mask.nonzero().view(-1)
        before = theta.clone()
        support = server.apply(
            SparseSlice(Span(0, LAYOUT.size), offsets, some_values(step)[offsets]) if mask.any() else None
        )
        assert support.tolist() == offsets.tolist()
        assert bits(theta[~mask]) == bits(before[~mask])
    assert bits(theta[never]) == bits(some_values()[never])
    everything, theta = rule(said(name, lazy=True, **options), some_values())
    plain, expected = rule(said(name, **options), some_values())
    for step in range(3):
        offsets = torch.arange(LAYOUT.size)
        everything.apply(SparseSlice(Span(0, LAYOUT.size), offsets, some_values(step)))
        plain.apply(dense(some_values(step)))
    assert bits(theta) == bits(expected)


def test_a_schedule_at_its_end_leaves_the_rate_where_it_is():
    schedule = {"name": "OneCycleLR", "options": {"max_lr": 0.1, "total_steps": 3}}
    server, theta = rule(said("SGD", schedule, lr=0.1), some_values())
    for step in range(8):
        server.apply(dense(some_values(step)))
    again, restored = rule(said("SGD", schedule, lr=0.1), theta)
    again.restore(cloned(server.export()))
    for each in (server, again):
        each.apply(dense(some_values(9)))
    assert bits(restored) == bits(theta)


def test_a_schedule_that_runs_away_is_held():
    schedule = {"name": "ExponentialLR", "options": {"gamma": 1e30}}
    server, theta = rule(said("SGD", schedule, lr=0.1), some_values())
    for step in range(5):
        server.apply(dense(some_values(step)))
    assert bool(theta.isfinite().all())


def test_groups_have_their_own_options_and_what_is_in_none_stays():
    groups = [
        {"tensors": [0], "options": {"lr": 0.5}},
        {"tensors": [2], "options": {"weight_decay": 0.3}},
    ]
    server, theta = rule(said("SGD", groups=groups, lr=0.1), some_values())
    server.apply(dense(torch.ones(LAYOUT.size)))
    expected = some_values()
    expected[:12] -= 0.5
    expected[17:] -= 0.1 * (1 + 0.3 * expected[17:])
    torch.testing.assert_close(theta, expected)
    assert bits(theta[12:17]) == bits(some_values()[12:17])


@given(
    name=st.sampled_from(sorted(ELEMENTWISE)),
    exponents=st.lists(st.integers(-40, 18), min_size=LAYOUT.size, max_size=LAYOUT.size),
    steps=st.integers(1, 4),
)
@settings(deadline=None, max_examples=examples(60))
def test_no_gradient_that_is_taken_leads_out_of_fp32(name, exponents, steps):
    server, theta = rule(said(name), some_values())
    gradient = 10.0 ** torch.tensor(exponents, dtype=torch.float32) * some_values(1).sign()
    for _ in range(steps):
        before = theta.clone()
        if (reason := refused(server.apply, dense(gradient))) is not None:
            assert reason is ErrorCode.NON_FINITE
            assert bits(theta) == bits(before)
        assert bool(theta.isfinite().all())


@pytest.mark.parametrize(
    "settings",
    [
        said("Nonsense"),
        said("LBFGS"),
        said("SparseAdam"),
        said("Optimizer"),
        said("SGD", lr="fast"),
        said("SGD", lr=-1),
        said("SGD", lr=1e9),
        said("SGD", speed=1),
        said("SGD", foreach=True),
        said("Adam", eps=0.0),
        said("Adam", betas=[2, 3]),
        said("SGD", params=[1]),
        said("Rprop", lazy=True),
        said("SGD", {"name": "LambdaLR"}),
        said("SGD", {"name": "ReduceLROnPlateau"}),
        said("SGD", {"name": "Nonsense"}),
        said("SGD", {"name": "StepLR", "options": {"step_size": 1, "code": "import os"}}),
        said("SGD", {"name": "StepLR", "options": {"step_size": 0}}),
        said("SGD", {"name": "StepLR"}),
        said("SGD", [1]),
        said("SGD", groups=[{"tensors": [0, 0]}]),
        said("SGD", groups=[{"tensors": [99]}]),
        said("SGD", groups=[{"tensors": ["all"]}]),
        said("SGD", groups=[{"tensors": [0], "options": {"code": 1}}]),
        said("SGD", groups={"a": 1}),
        said("SGD") | {"scheduler_every": "0"},
        said("SGD") | {"scheduler_every": "often"},
        {"update": "torch"},
        {"update": "torch", "optimizer": "[" * 100_000},
        {"update": "torch", "optimizer": json.dumps({"name": "SGD", "options": {"lr": 1e-3}, "code": "x"})},
        {"update": "torch", "optimizer": '{"name": "SGD", "options": {"lr": NaN}}'},
        {"update": "exec"},
    ],
)
def test_what_is_no_optimizer_is_refused_before_anything_is_agreed(settings):
    with open_shards() as (shard,):
        reason = refused(join, shard, LAYOUT, ANNA, "server_optimizer", settings)
        if reason is None:  # what depends on the model is found when it is there
            generation = join(shard, LAYOUT, ANNA, "server_optimizer", settings).generation
            reason = refused(upload, shard, some_values(), ANNA, generation)
        else:
            assert not shard.run.method
        assert reason is ErrorCode.BAD_REQUEST
        assert shard.model is None


def test_a_sparse_push_that_changes_everything_is_answered_by_its_largest_differences():
    """``auto`` goes to top-k, as dense replies to sparse pushes would undo the compression; not for dense ones."""
    layout = layout_of((1000, F32))
    values = some_values(size=1000)
    for sparse in (True, False):
        with open_shards(down_dense_below=0, down_density=0.05) as (shard,):
            upload(shard, values, ANNA, join(shard, layout, ANNA, "x", said("Adam")).generation)
            first = pull(shard)
            entries = {5: 1.0} if sparse else [dense(some_values(1, 1000))]
            push(shard, 1, entries, base=0)
            second = pull(shard, base=0, acknowledged=first.number)
            assert second.image is sparse
            push(shard, 2, entries, base=1)
            third = pull(shard, base=1, acknowledged=second.number, image=second.image)
            assert third.mode is (ReplyMode.TOPK if sparse else ReplyMode.EXACT)


def test_a_push_without_entries_is_no_step():
    with open_shards() as (shard,):
        upload(shard, some_values(), ANNA, join(shard, LAYOUT, ANNA, "x", said("SGD", momentum=0.9)).generation)
        push(shard, 1, [dense(some_values(1))])
        before = bits(theta(shard))
        push(shard, 2, [], base=1)
        assert bits(theta(shard)) == before


@pytest.mark.parametrize(
    "words",
    [
        {"optimizer": '{"name": [], "options": {}}'},
        {"optimizer": '{"name": "SGD", "options": {"momentum": 1' + "0" * 400 + "}}"},
        {"optimizer": '{"name": "SGD", "options": {"momentum": ' + "[" * 900 + "]" * 900 + "}}"},
        {"optimizer": '{"name": "Adam", "options": {"betas": []}}'},
        {"optimizer": '{"name": "Adam", "options": {"betas": [0.9, 0.9, 0.9]}}'},
        {"optimizer": '{"name": "Muon", "options": {"ns_steps": 1000000000}}'},
        {"scheduler": '{"name": []}'},
        {"scheduler": '{"name": "StepLR", "options": {"step_size": 1, "last_epoch": 5}}'},
        {"scheduler_every": "²"},
        {"scheduler_every": "9" * 5000},
        {"groups": '[{"tensors": [0], "options": {"lr": 1' + "0" * 400 + "}}]"},
        {"groups": '[{"tensors": [0], "options": {"momentum": "much"}}]'},
        {"groups": '[{"tensors": [0], "options": {"momentum": -1.0}}]'},
        {"groups": "[" + ",".join(['{"tensors": []}'] * 10_000) + "]"},
    ],
    ids=lambda words: next(iter(words)),
)
def test_nonsense_is_a_bad_request_and_no_fault_of_the_server(words):
    assert refused(TrainingMode.of, said("SGD", lr=0.1) | words) is ErrorCode.BAD_REQUEST


def test_a_scheduler_may_have_a_number_for_each_group():
    """Also at a shard that has nothing of one of the groups."""
    groups = [{"tensors": [0], "options": {}}, {"tensors": [1, 2], "options": {}}]
    cycle = {"name": "OneCycleLR", "options": {"max_lr": [0.1, 0.2], "total_steps": 20, "cycle_momentum": False}}
    settings = said("SGD", cycle, groups, lr=0.1)
    values, gradient = some_values(), some_values(1)
    whole, theta = rule(settings, values)
    part, there = rule(settings, values, Span(12, LAYOUT.size))
    for _ in range(5):
        whole.apply(SparseSlice(Span(0, LAYOUT.size), None, gradient))
        part.apply(SparseSlice(Span(12, LAYOUT.size), None, gradient[12:]))
    assert torch.equal(there, theta[12:])


def test_a_schedule_that_fails_late_leaves_the_rate_and_is_the_same_after_a_restart():
    """``2.0 ** x`` of a long triangular cycle overflows after the parameters have been stepped."""
    options = {"base_lr": 0.001, "max_lr": 0.002, "step_size_up": 1, "mode": "triangular2", "cycle_momentum": False}
    settings = said("SGD", {"name": "CyclicLR", "options": options}, lr=0.1)
    mine, theta = rule(settings, some_values())
    push = SparseSlice(Span(0, LAYOUT.size), torch.tensor([3]), torch.ones(1))
    for _ in range(2100):
        mine.apply(push)
    again, there = rule(settings, theta)
    again.restore(cloned(mine.export()))
    mine.apply(push)
    again.apply(push)
    assert torch.equal(theta, there)


def test_a_rate_never_leaves_its_bounds():
    mine, theta = rule(said("SGD", {"name": "ExponentialLR", "options": {"gamma": -1e200}}, lr=0.1), some_values())
    for _ in range(4):
        mine.apply(SparseSlice(Span(0, LAYOUT.size), None, torch.ones(LAYOUT.size)))
    assert theta.isfinite().all()


def test_a_lazy_step_names_what_it_changed_in_the_layouts_order():
    """Weights in one group and biases in another lie between one another, and replies are cut by order."""
    groups = [{"tensors": [0, 2], "options": {}}, {"tensors": [1], "options": {"lr": 0.5}}]
    mine, _ = rule(said("SGD", groups=groups, lazy=True, lr=0.1), some_values())
    support = mine.apply(SparseSlice(Span(0, LAYOUT.size), torch.tensor([1, 13, 18]), torch.ones(3)))
    assert support.tolist() == [1, 13, 18]


@pytest.mark.parametrize("name", sorted(LAZY))
def test_a_scalar_is_stepped_lazily_like_any_element(name):
    layout = layout_of((3, F32), ((), F32))
    options = {"lr": 0.1} | ({"momentum": 0.9} if name in ("SGD", "RMSprop") else {})
    lazy, there = rule(said(name, lazy=True, **options), torch.ones(4), layout=layout)
    dense, here = rule(said(name, **options), torch.ones(4), layout=layout)
    for _ in range(3):
        lazy.apply(SparseSlice(Span(0, 4), torch.arange(4), torch.full((4,), 0.5)))
        dense.apply(SparseSlice(Span(0, 4), None, torch.full((4,), 0.5)))
    torch.testing.assert_close(there, here)


def test_a_lazy_step_looks_at_what_was_sent_and_at_nothing_else():
    """Its cost is that of the push: a parameter far off is no matter of a push that does not name it."""
    values = torch.ones(LAYOUT.size)
    values[20] = 2e30
    server, theta = rule(said("SGD", lazy=True, lr=0.5), values)
    sparse = SparseSlice(Span(0, LAYOUT.size), torch.tensor([0, 3]), torch.ones(2))
    assert server.apply(sparse).tolist() == [0, 3]
    assert theta[[0, 3]].tolist() == [0.5, 0.5]
    touching = SparseSlice(Span(0, LAYOUT.size), torch.tensor([3, 20]), torch.ones(2))
    assert refused(server.apply, touching) is ErrorCode.NON_FINITE
    assert refused(server.apply, dense(torch.ones(LAYOUT.size))) is ErrorCode.NON_FINITE
    assert theta[3] == 0.5


@pytest.mark.parametrize("lazy", [False, True])
def test_a_schedule_leaves_the_warnings_of_the_process_as_they_are_and_gives_none(lazy, monkeypatch):
    """Filters are those of all threads: one that changes them and sets them back may set back another's change."""
    seen, real = [], torch.optim.lr_scheduler.StepLR.get_lr

    def get_lr(self):
        seen.append([*warnings.filters])
        return real(self)

    monkeypatch.setattr(torch.optim.lr_scheduler.StepLR, "get_lr", get_lr)
    scheduler = {"name": "StepLR", "options": {"step_size": 1}}
    push = SparseSlice(Span(0, LAYOUT.size), torch.tensor([1]), torch.tensor([1.0]))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        before = [*warnings.filters]
        first, _ = rule(said("Adam", scheduler, lazy=lazy, lr=0.1), some_values())
        first.apply(push)
        again, _ = rule(said("Adam", scheduler, lazy=lazy, lr=0.1), some_values())
        again.restore(cloned(first.export()))
        again.apply(push)
    assert len(seen) > 4
    assert all(each == before for each in seen)
    assert [str(each.message) for each in warned] == []
