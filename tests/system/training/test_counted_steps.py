"""Steps and samples are counted once, whatever becomes of a push or of the worker."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import psclient
from psclient.errors import ConfigurationError, UpdateOverflowError
from tests.system.operating.asking import status
from tests.system.tools import QUICK


def backward(parameter, factor):
    parameter.grad = None
    (parameter * factor).sum().backward()


def test_a_late_worker_begins_in_its_density_schedule_where_its_pushes_do():
    """Where models are averaged in groups, the first push of a worker that joins late has a later number than 1."""
    with psclient.LocalServer() as server:
        for steps in (4, 2):
            parameter, asked = nn.Parameter(torch.ones(100)), []
            with psclient.WAGMA(
                torch.optim.SGD([parameter], lr=0.1),
                density=lambda step, asked=asked: asked.append(step) or (0.5 if step < 3 else 0.05),
                server=server,
                settings=QUICK,
            ) as optimizer:
                pushed = []
                for _ in range(steps):
                    backward(parameter, torch.randn(100))
                    optimizer.step()
                    pushed.append(optimizer.report.step)
            assert asked == [1, *pushed], "the first is what the param groups begin with"
        assert pushed[0] > 4


@pytest.mark.parametrize("overlap", [False, True])
def test_samples_of_an_abandoned_push_are_counted_with_the_next(overlap):
    parameter = nn.Parameter(torch.zeros(100))
    model = nn.Module()
    model.register_parameter("p", parameter)
    with (
        psclient.LocalServer() as server,
        psclient.GradientDropping(
            [parameter], lr=1e8, model=model, server=server, overlap=overlap, settings=QUICK
        ) as optimizer,
    ):
        told = {} if overlap else {"samples": 10}  # with overlap a step without a call of the model is one sample
        backward(parameter, torch.cat([torch.full((1,), 1e35), torch.ones(99)]))
        with pytest.raises(UpdateOverflowError):
            optimizer.step(**told)
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.flush()
        assert status(server.addresses[0]).samples == 0, "a flush is no step"
        for _ in range(2):
            backward(parameter, torch.ones(100))
            optimizer.step(**told)
        optimizer.pull()
        assert status(server.addresses[0]).samples == optimizer.totals.samples == (3 if overlap else 30)


def test_samples_of_a_refused_push_are_counted_with_the_next():
    late, quick = nn.Parameter(torch.zeros(100)), nn.Parameter(torch.zeros(100))
    with (
        psclient.LocalServer(shards=2, max_staleness=1) as server,
        psclient.ASGD([late], lr=1.0, server=server, worker="late", settings=QUICK) as optimizer,
        psclient.ASGD([quick], lr=1.0, server=server, worker="quick", settings=QUICK) as other,
    ):
        for _ in range(2):
            for _ in range(2):
                backward(quick, torch.ones(100))
                other.step(samples=1)
            backward(late, torch.ones(100))
            optimizer.step(samples=10)  # two pushes too late
            assert optimizer.report.refused == 2
        for _ in range(2):
            backward(late, torch.ones(100))
            optimizer.step(samples=5)
        assert [status(address).samples for address in server.addresses] == [34, 34]


def test_a_checkpoint_that_runs_a_backward_of_its_own_is_named():
    layer = nn.Linear(4, 4)
    with (
        psclient.LocalServer() as server,
        psclient.DGS(layer.parameters(), lr=0.1, model=layer, server=server, overlap=True, settings=QUICK) as optimizer,
    ):
        x = torch.randn(2, 4, requires_grad=True)
        y = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
        with pytest.raises(ConfigurationError, match=r"'(weight|bias)' is used in several: .*use_reentrant=False"):
            y.sum().backward()
        optimizer.zero_grad()
        for _ in range(2):
            y = checkpoint(layer, checkpoint(layer, x, use_reentrant=False), use_reentrant=False)
            y.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
