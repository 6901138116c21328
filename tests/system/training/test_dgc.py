"""DGC with its default settings: small tensors travel whole, and keep their momentum."""

import pytest
import torch
from torch import nn

import psclient
from psclient.settings import ClientSettings

STEPS, MOMENTUM = 200, 0.9


def test_a_small_tensor_moves_as_far_as_a_large_one():
    """Factor masking is for entries that were selected before others; the reference leaves small tensors alone."""
    small, large = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(20_000))
    settings = ClientSettings(selector="exact", deadline_seconds=20)
    with (
        psclient.LocalServer(down_mode="exact") as server,
        psclient.DGC([small, large], 1.0, MOMENTUM, density=0.01, server=server, settings=settings) as optimizer,
    ):
        for _ in range(STEPS):
            small.grad, large.grad = torch.ones_like(small), torch.ones_like(large)
            optimizer.step()
        optimizer.flush()
        optimizer.pull()
        moved, of_large = -small.detach() / STEPS, -large.detach() / STEPS
        sgd = sum(1 - MOMENTUM ** (step + 1) for step in range(STEPS)) / (1 - MOMENTUM) / STEPS
        torch.testing.assert_close(moved, torch.full_like(moved, sgd), rtol=1e-4, atol=0)
        assert moved.mean().item() == pytest.approx(of_large.mean().item(), rel=0.1)
