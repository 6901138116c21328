"""Groups that change in the middle of training: nothing is lost, with overlap and without."""

import itertools
import logging
import random

import pytest
import torch
from torch import nn

import psclient
from psclient.errors import ConfigurationError
from psclient.rpc.local_server import LocalServer
from tests.system.tools import QUICK, engine_of, make_data, make_model, train_step

SIZES = (40, 7, 300, 1, 120, 60)
SETTINGS = QUICK.model_copy(update={"bucket_bytes": 400})


class Apart(nn.Module):
    """Layers whose gradients depend on no parameter."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in SIZES)
        for layer in self.layers:
            nn.init.zeros_(layer.weight)

    def forward(self, inputs):
        return torch.stack([layer(x).sum() for layer, x in zip(self.layers, inputs, strict=True)]).sum()


def make_inputs(generator):
    """Multiples of 1/8, so that every sum in the test is exact."""
    return [torch.randint(-64, 65, (1, size), generator=generator) / 8 for size in SIZES]


def every_grouping(count):
    for inner in itertools.chain.from_iterable(itertools.combinations(range(1, count), n) for n in range(count)):
        cuts = (0, *inner, count)
        yield tuple(range(count - end, count - start) for start, end in itertools.pairwise(cuts))


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
def test_what_was_accumulated_is_applied_or_held_through_groups_that_change_at_every_step(overlap):
    shuffled = random.Random(0).sample(list(every_grouping(len(SIZES))), 20)
    generator, model = torch.Generator().manual_seed(0), Apart()
    accumulated = [torch.zeros(1, size) for size in SIZES]
    with (
        LocalServer(shards=2, down_mode="exact") as server,
        psclient.GradientDropping(
            model.parameters(), lr=0.5, density=0.2, model=model, server=server, overlap=overlap, settings=SETTINGS
        ) as optimizer,
    ):
        for groups in shuffled:
            engine_of(optimizer).grouping.groups = groups
            inputs = make_inputs(generator)
            for total, x in zip(accumulated, inputs, strict=True):
                total += 0.5 * x
            optimizer.zero_grad()
            model(inputs).backward()
            optimizer.step()
        optimizer.pull()
        held = [optimizer.state[layer.weight]["residual"].view(1, -1) for layer in model.layers]
        assert sum(float(residual.abs().sum()) for residual in held) > 0
        for total, layer, residual in zip(accumulated, model.layers, held, strict=True):
            assert torch.equal(total, residual - layer.weight.detach())
        optimizer.flush()
        optimizer.pull()
        for total, layer in zip(accumulated, model.layers, strict=True):
            assert torch.equal(total, -layer.weight.detach())


def test_a_worker_with_overlap_merges_by_what_it_has_measured(caplog):
    caplog.set_level(logging.INFO, "psclient")
    model = make_model()
    settings = QUICK.model_copy(update={"merge": "mgs"})
    with (
        LocalServer() as server,
        psclient.DGS(
            model.parameters(), 0.1, density=0.1, model=model, server=server, overlap=True, settings=settings
        ) as optimizer,
    ):
        losses = [train_step(model, optimizer, *make_data()) for _ in range(40)]
        assert losses[-1] < losses[0]
        optimizer.pull()
    assert sum("tensors travel in" in each.getMessage() for each in caplog.records) == 1
    groups = engine_of(optimizer).grouping.groups
    assert sorted(position for group in groups for position in group) == list(range(len(list(model.parameters()))))


def test_layers_get_densities_of_their_own_and_lose_nothing():
    generator, model = torch.Generator().manual_seed(0), Apart()
    accumulated = [torch.zeros(1, size) for size in SIZES]
    density = psclient.schedules.lags(lowest=0.01, highest=0.5, start=0.1)
    with (
        LocalServer(down_mode="exact") as server,
        psclient.GradientDropping(
            model.parameters(), lr=0.5, density=density, model=model, server=server, overlap=True, settings=SETTINGS
        ) as optimizer,
    ):
        for _ in range(20):
            inputs = make_inputs(generator)
            for total, x in zip(accumulated, inputs, strict=True):
                total += 0.5 * x
            optimizer.zero_grad()
            model(inputs).backward()
            optimizer.step()
        optimizer.pull()
        densities = engine_of(optimizer).grouping.densities
        assert sorted(densities) == list(range(len(SIZES)))
        assert all(0.01 <= density <= 0.5 for density in densities.values())
        for total, layer in zip(accumulated, model.layers, strict=True):
            residual = optimizer.state[layer.weight]["residual"].view(1, -1)
            assert torch.equal(total, residual - layer.weight.detach())


def test_densities_by_layer_without_overlap_are_refused_before_anything_is_dialled():
    model = make_model()
    with pytest.raises(ConfigurationError, match="overlap=True"):
        psclient.DGS(model.parameters(), 0.1, density=psclient.schedules.lags(), model=model, server="nowhere:1")
