"""A refused push goes back into the memory that it came from, whatever a scheduler has changed since."""

import pytest
import torch
from torch import nn

import psclient
from psclient.errors import ServerUnreachableError
from psclient.rpc.local_server import LocalServer
from tests.system.tools import QUICK, go_on, stop

METHODS = {
    "dgs": (psclient.DGS, 0.5),
    "dgc": (psclient.DGC, 1.0),
    "gradient_dropping": (psclient.GradientDropping, 0.5),
}
"""Each with what its residual holds of a gradient of 1 at a rate of 0.5: DGC applies the rate when it sends."""


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_what_is_refused_comes_back_at_the_rate_and_the_momentum_of_its_push(name, overlap):
    make, held = METHODS[name]
    w, others = nn.Parameter(torch.zeros(50)), nn.Parameter(torch.zeros(50))
    with LocalServer(down_mode="exact", lease_seconds=60, max_staleness=1) as server:
        options = {"density": 1.0, "server": server, "settings": QUICK}
        with (
            make([w], lr=0.5, worker="late", overlap=overlap, **options) as late,
            make([others], lr=0.5, worker="early", **options) as early,
        ):
            for _ in range(3):
                others.grad = torch.ones(50)
                early.step()
            if name == "gradient_dropping":
                scheduler = torch.optim.lr_scheduler.StepLR(late, 1, 0.1)
            else:  # it turns the momentum round, too
                scheduler = torch.optim.lr_scheduler.OneCycleLR(late, 0.5, total_steps=10, base_momentum=0.2)
            late.param_groups[0]["lr"] = 0.5
            stop(server, late)
            w.sum().backward()
            if overlap:
                late.step()  # its push is settled beside the next step
            else:
                with pytest.raises(ServerUnreachableError):
                    late.step()
            before = dict(late.param_groups[0])
            scheduler.step()
            assert late.param_groups[0]["lr"] != before["lr"]
            assert name == "gradient_dropping" or late.param_groups[0]["momentum"] != before["momentum"]
            go_on(server, late)
            late.pull()
            assert late.totals.refused == 1
            torch.testing.assert_close(late.state[w]["residual"], torch.full((50,), held))
