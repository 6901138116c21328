"""What the ranks of sharded workers do in tests; :mod:`tests.system.rank_processes` starts them."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import psclient
from tests.system import rank_processes
from tests.system.tools import QUICK, make_data, make_model

launch = partial(rank_processes.launch, __name__)


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def trains(rank: int, server: str) -> Any:
    torch.manual_seed(rank)
    model = fully_shard(make_model(0, batch_norm=False), mesh=init_device_mesh("cpu", (2,)))
    x, y = make_data()
    with psclient.NodeOptimizer(
        psclient.ASGD, model.parameters(), lr=0.1, momentum=0.5, model=model, server=server, settings=QUICK
    ) as optimizer:
        joined = whole(model)
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rank::2]), y[rank::2]).backward()
            optimizer.step()
        return {"joined": joined, "whole": whole(model), "version": optimizer.version, "samples": optimizer.totals.samples}
