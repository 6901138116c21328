"""Each method step by step against its published recurrence, and its limits ρ = 1, lr = 0, g = 0."""

import pytest
import torch
from torch import nn

from psclient.optim.dgc import DGC
from psclient.optim.momentum_sgd import MomentumSGD
from tests.psclient.method_makers import (
    EPS,
    METHODS,
    REFERENCES,
    SIZES,
    SPARSE,
    Tensors,
    come_back,
    dense,
    gradients,
    group,
    push,
    rates,
    whole,
)
from tests.tiers import long_but

STEPS = 25


@pytest.mark.parametrize("schedule", ["constant", "steps down", "wanders"])
@pytest.mark.parametrize("density", long_but([0.01, 1.0], [0.01, 0.1, 0.5, 1.0]))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", METHODS)
def test_a_method_sends_what_its_published_recurrence_sends(name, size, density, schedule):
    m = 0.7
    paper, state = {}, Tensors()
    for g, lr in zip(gradients(size, STEPS), rates(schedule, STEPS), strict=True):
        expected = REFERENCES[name](paper, g.double(), lr, m, density)
        sent = push(name, state, g.clone(), group(lr, m), density)
        offsets = torch.arange(size) if sent.offsets is None else sent.offsets
        assert offsets.tolist() == expected.nonzero().view(-1).tolist()
        torch.testing.assert_close(dense(sent, size).double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_what_is_sent_is_fp32_at_rising_offsets_and_the_gradient_is_left_alone(name):
    state = Tensors()
    for g in gradients(200, 5):
        before = g.clone()
        sent = push(name, state, g, group(momentum=0.5), 0.1)
        assert sent.values.dtype == torch.float32
        assert sent.offsets is None or bool((sent.offsets.diff() > 0).all())
        assert torch.equal(g, before)
        memories = [memory for memory in state.values() if isinstance(memory, torch.Tensor)]
        assert all(memory.shape == (200,) and memory.dtype == torch.float32 for memory in memories)


@pytest.mark.parametrize("name", METHODS)
def test_what_is_sent_does_not_change_afterwards(name):
    """A push in doubt is repeated with the same bytes: it shares no memory with the state."""
    state = Tensors()
    first = push(name, state, torch.ones(50), group(momentum=0.5), 0.5)
    kept = first.values.clone()
    push(name, state, torch.ones(50), group(momentum=0.5), 0.5)
    come_back(name, state, group(momentum=0.5), whole(torch.ones(50)), torch.ones(50))
    assert torch.equal(first.values, kept)


def per_step_against_sgd(name, momentum, sgd_momentum, ulps):
    """Start each step from the same parameters as torch.optim.SGD and compare where both arrive."""
    for size in SIZES:
        parameter = nn.Parameter(torch.randn(size))
        theta = parameter.detach().clone()
        sgd = torch.optim.SGD([parameter], lr=0.1, momentum=sgd_momentum)
        state, scale = Tensors(), torch.zeros(size)
        for g in gradients(size, STEPS, seed=7):
            with torch.no_grad():
                parameter.copy_(theta)
            parameter.grad = g
            sgd.step()
            theta = theta - dense(push(name, state, g, group(0.1, momentum)), size)
            scale = sgd_momentum * scale + 0.1 * g.abs()
            assert bool(((theta - parameter.detach()).abs() <= ulps * EPS * (theta.abs() + scale)).all())


def test_dgs_at_full_density_and_constant_rate_is_sgd_with_momentum():
    for momentum in (0.0, 0.3, 0.9):
        per_step_against_sgd("dgs", momentum, momentum, ulps=6)


@pytest.mark.parametrize("name", ["asgd", "gradient_dropping"])
def test_without_momentum_at_full_density_it_is_sgd(name):
    per_step_against_sgd(name, 0.0, 0.0, ulps=2)


def test_asgd_with_local_momentum_is_sgd_with_momentum():
    per_step_against_sgd("asgd", 0.9, 0.9, ulps=2)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_dgc_at_full_density_masks_all_momentum_and_is_sgd_without(momentum):
    per_step_against_sgd("dgc", momentum, 0.0, ulps=2)


@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1}, {"nesterov": True}, {"dampening": 0.2, "momentum": 0.5}]
)
def test_momentum_sgd_is_torch_optim_sgd_bit_for_bit(options):
    torch.manual_seed(3)
    ours = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    theirs = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    theirs.load_state_dict(ours.state_dict())
    pairs = (
        (ours, MomentumSGD(ours.parameters(), lr=0.05, **options)),
        (theirs, torch.optim.SGD(theirs.parameters(), lr=0.05, **{"momentum": 0.9, **options})),
    )
    for step in range(20):
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        for model, optimizer in pairs:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        for mine, yours in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, yours)


@pytest.mark.parametrize("name", METHODS)
def test_a_zero_learning_rate_moves_nothing(name):
    state = Tensors()
    for g in gradients(100, 5):
        sent = push(name, state, g, group(0.0, 0.9), 0.1)
        assert not dense(sent, 100).any()
        assert bool(sent.values.isfinite().all())
    come_back(name, state, group(0.0, 0.9), whole(torch.zeros(100)), torch.zeros(100))
    memories = [memory for memory in state.values() if isinstance(memory, torch.Tensor)]
    assert all(bool(memory.isfinite().all()) for memory in memories)


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("size", SIZES)
def test_an_all_zero_gradient_sends_nothing(name, size):
    state = Tensors()
    for _ in range(3):
        sent = push(name, state, torch.zeros(size), group(momentum=0.9))
        assert sent.offsets.numel() == sent.values.numel() == 0


@pytest.mark.parametrize("name", long_but(SPARSE[:1], SPARSE))
def test_every_element_is_updated_in_the_end(name):
    for size in SIZES:
        state, touched = Tensors(), torch.zeros(size, dtype=torch.bool)
        for g in gradients(size, 400):
            touched[push(name, state, g.abs() + 0.1, group(momentum=0.5), 0.01).offsets] = True
        assert bool(touched.all())


def test_dgs_is_the_published_recurrence_without_its_division():
    """Between two steps the residual r is m times the paper's u."""
    state, paper = Tensors(), {}
    for g in gradients(300, STEPS):
        REFERENCES["dgs"](paper, g.double(), 0.1, 0.6, 0.05)
        push("dgs", state, g, group(0.1, 0.6), 0.05)
        torch.testing.assert_close(state["residual"].double(), 0.6 * paper["u"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("clip", [None, 0.5, 1e9])
@pytest.mark.parametrize("workers", [0, 1, 4])
def test_dgc_clips_the_whole_gradient_to_its_share(clip, workers):
    found = gradients(10, 3) + gradients(100, 1)
    optimizer = type("Unjoined", (), {"clip_norm": clip})()
    scale = DGC._gradient_scale(optimizer, found, workers)
    norm = torch.cat(found).norm().item()
    bound = None if clip is None else clip / max(1, workers) ** 0.5
    assert float(scale) == pytest.approx(1.0 if bound is None or norm <= bound else bound / norm, rel=1e-5)
    assert DGC._gradient_scale(optimizer, [torch.zeros(3)], workers) == 1.0
