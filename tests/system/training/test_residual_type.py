"""Residuals and momenta in bf16: half the memory, the same training but for rounding, and a state that goes on."""

import pytest
import torch
from torch import nn

import psclient
from psclient.rpc.local_server import LocalServer
from tests.system.tools import QUICK

HALVES = QUICK.model_copy(update={"residual_type": "bf16"})
MEMORIES = {psclient.DGS: {"residual"}, psclient.DGC: {"residual", "momentum"}, psclient.GradientDropping: {"residual"}}
TABLE = 2_000


def problem():
    """A table of which steps touch few rows, and a layer above it, with a target to be found."""
    torch.manual_seed(7)
    model = nn.ModuleDict({"table": nn.Embedding(TABLE, 8, sparse=True), "out": nn.Linear(8, 64)})
    target = torch.randn(TABLE, 64, generator=torch.Generator().manual_seed(8))
    return model, target


def trained(kind, server, settings, steps=60, state=None):
    """Losses, and the state behind the last step."""
    model, target = problem()
    options = {"density": 0.1, "model": model, "server": server, "settings": settings, "worker": "anna"}
    with kind(model.parameters(), 0.5, **options) as optimizer:
        if state is not None:
            optimizer.load_state_dict(state)
        losses, random = [], torch.Generator().manual_seed(3)
        for _ in range(steps):
            rows = torch.randint(0, 50, (64,), generator=random)
            loss = (model["out"](model["table"](rows)) - target[rows]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, optimizer.state_dict()


@pytest.mark.long
@pytest.mark.parametrize("kind", MEMORIES, ids=lambda kind: kind.__name__)
def test_a_worker_with_half_the_memory_trains_as_well(kind):
    with LocalServer(down_mode="exact") as server, LocalServer(down_mode="exact") as other:
        losses, state = trained(kind, server, HALVES)
        expected, _ = trained(kind, other, QUICK)
    assert losses[-1] < 0.9 * losses[0]
    assert losses[-1] == pytest.approx(expected[-1], rel=0.05)
    for memories in state["state"].values():
        kept = {name: memory.dtype for name, memory in memories.items() if isinstance(memory, torch.Tensor)}
        assert kept == dict.fromkeys(MEMORIES[kind], torch.bfloat16)


@pytest.mark.parametrize("settings", [HALVES, QUICK], ids=["bf16", "fp32"])
def test_a_saved_state_goes_on_with_either_type(settings, tmp_path):
    with LocalServer(down_mode="exact") as server:
        _, state = trained(psclient.DGC, server, HALVES, 5)
        torch.save(state, tmp_path / "state")
        _, loaded = trained(psclient.DGC, server, settings, 0, torch.load(tmp_path / "state", weights_only=False))
        for mine, theirs in zip(loaded["state"].values(), state["state"].values(), strict=True):
            for name in ("residual", "momentum"):
                assert torch.equal(mine[name].float(), theirs[name].float())
        _, later = trained(psclient.DGC, server, settings, 1, loaded)
    kept = {"bf16": torch.bfloat16, "fp32": torch.float32}[settings.residual_type]
    assert {memories["residual"].dtype for memories in later["state"].values()} == {kept}
