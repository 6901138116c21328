"""A method that pushes every entry is answered exactly, also where a step touches a small part of the model."""

import copy

import pytest
import torch
from torch import nn

import psclient
from tests.system.tools import QUICK, optimizer_of
from tests.tiers import long_but

STEPS = 24


class Experts(nn.Module):
    """A mixture of experts that take turns: a step has gradients for a sixth of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(96, 96) for _ in range(6))
        self.head = nn.Linear(96, 10)

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Use one expert."""
        return self.head(self.experts[expert](x))


def make_experts() -> Experts:
    """The same ones each time."""
    torch.manual_seed(1)
    return Experts()


def train(model: Experts, optimizer: torch.optim.Optimizer) -> list[float]:
    """The losses of some steps."""
    generator, losses = torch.Generator().manual_seed(0), []
    x, y = torch.randn(64, 96, generator=generator), torch.randint(0, 10, (64,), generator=generator)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x, step % 6), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


METHODS = {
    "asgd": {"lr": 0.5},
    "adamw": {"lr": 1e-3},
    "rmsprop": {"lr": 0.01, "density": 1.0},
    "dgs": {"momentum": 0.5, "density": 1.0},
    "dgs, a schedule": {"density": lambda step: 1.0},
    "outer": {"sync_every": 1},
}


@pytest.mark.long
@pytest.mark.parametrize("method", long_but(list(METHODS)[:2], METHODS))
def test_a_dense_method_is_answered_exactly_where_a_step_touches_a_part_of_the_model(method):
    losses = {}
    for mode in ("auto", "exact"):
        model = make_experts()
        with (
            psclient.LocalServer(down_mode=mode) as server,
            optimizer_of(method.partition(",")[0], model, server=server, worker="w-0", **METHODS[method]) as optimizer,
        ):
            losses[mode] = train(model, optimizer)
            assert optimizer.report.reply_mode == "exact"
    assert losses["auto"] == losses["exact"]


def test_dense_asgd_of_experts_is_sgd():
    model = make_experts()
    reference = copy.deepcopy(model)
    with (
        psclient.LocalServer() as server,
        optimizer_of("asgd", model, lr=0.5, server=server) as optimizer,
    ):
        mine = train(model, optimizer)
    theirs = train(reference, torch.optim.SGD(reference.parameters(), lr=0.5))
    assert mine == pytest.approx(theirs, abs=1e-6)


def test_a_schedule_that_ends_below_1_gets_its_sparse_replies_then():
    model = make_experts()
    settings = QUICK.model_copy(update={"dense_below": 0})
    with (
        psclient.LocalServer(down_dense_below=0) as server,
        optimizer_of(
            "adamw", model, 1e-3, density=lambda step: 1.0 if step <= 12 else 0.02, server=server, settings=settings
        ) as optimizer,
    ):
        train(model, optimizer)
        assert optimizer.report.reply_mode == "topk"
        assert optimizer.report.pull_entries < 0.05 * sum(p.numel() for p in model.parameters())


def test_an_operator_who_wants_topk_replies_gets_them():
    model = make_experts()
    with (
        psclient.LocalServer(down_mode="topk", down_dense_below=0) as server,
        optimizer_of("asgd", model, lr=0.5, server=server) as optimizer,
    ):
        train(model, optimizer)
        assert optimizer.report.reply_mode == "topk"
