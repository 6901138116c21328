"""``step(closure)`` that is called again after an error: a batch that had been pushed is not computed again."""

import pytest
import torch
from torch import nn

from psclient.errors import ServerUnreachableError
from psclient.rpc.local_server import LocalServer
from tests.system.tools import QUICK, go_on, optimizer_of, stop

OPTIONS = {"asgd": {}, "overlap": {}, "outer": {"sync_every": 1, "outer_optimizer": None}}


def maker(kind, layer, **options):
    return optimizer_of(kind, layer, lr=1.0, **OPTIONS[kind], **options)


def constant():
    """A layer whose gradient is 1 everywhere, in every batch."""
    layer = nn.Linear(50, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def closure_of(layer, optimizer, batch, calls):
    def closure():
        calls.append(batch)
        optimizer.zero_grad()
        layer(torch.ones(1, 50)).sum().backward()
        return f"loss of batch {batch}"

    return closure


def moved(optimizer, layer):
    optimizer.pull()
    return -layer.weight.detach()[0, 0].item()


HASTY = QUICK.model_copy(update={"patience_seconds": 8})
"""Of an exchange that was under way already when the server has stopped."""


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_batch_is_pushed_once_where_its_step_is_called_again(kind):
    layer, calls, errors = constant(), [], 0
    with (
        LocalServer(down_mode="exact", lease_seconds=60) as server,
        maker(kind, layer, server=server, settings=HASTY) as optimizer,
    ):
        for batch in range(4):
            if batch == 1:
                stop(server, optimizer)
            for _ in range(2):  # as Lightning's optimizer_step() may, with a closure that it wraps anew each time
                try:
                    loss = optimizer.step(closure_of(layer, optimizer, batch, calls))
                    break
                except ServerUnreachableError:
                    errors += 1
                    go_on(server, optimizer)
            assert loss == f"loss of batch {batch}"
        assert moved(optimizer, layer) == optimizer.version == 4
        assert errors == 1
        if kind != "overlap":  # there it is the next step that meets the error, before its own push has begun
            assert calls == [0, 1, 2, 3]
            assert optimizer.totals.samples == 4


@pytest.mark.parametrize("kind", ["asgd", "outer"])
def test_zero_grad_says_that_the_next_batch_comes(kind):
    layer, calls = constant(), []
    with (
        LocalServer(down_mode="exact", lease_seconds=60) as server,
        maker(kind, layer, server=server, settings=QUICK) as optimizer,
    ):
        stop(server, optimizer)
        with pytest.raises(ServerUnreachableError):
            optimizer.step(closure_of(layer, optimizer, 0, calls))
        go_on(server, optimizer)
        optimizer.zero_grad()
        assert optimizer.step(closure_of(layer, optimizer, 1, calls)) == "loss of batch 1"
        assert calls == [0, 1]
        assert moved(optimizer, layer) == optimizer.version == 2
