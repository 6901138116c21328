"""A worker of ASGD in a process of its own, which tells the bytes of a push, and what its steps take beside rest.

``python -m tests.system.dense_pusher SERVER ELEMENTS VALUE_TYPE``: one line, three numbers of bytes: of a push in fp32,
of the state that the method keeps, and by how much the peak of the resident set exceeds that before the first push.
"""

import sys
from pathlib import Path

import torch
from torch import nn

import psclient
from psclient.rpc.local_server import LocalServer
from tests.system.tools import QUICK


def resident(name: str) -> int:
    """Return ``VmRSS``, or the peak ``VmHWM`` since it was reset, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) << 10


def take_steps(server: str, elements: int, value_type: str) -> tuple[int, int, int]:
    """Train a model of four tensors for three steps; return the three numbers."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(elements // 4)) for _ in range(4))
    for parameter in model:
        parameter.grad = torch.randn(elements // 4)
    settings = QUICK.model_copy(update={"value_type": value_type})
    with psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server, settings=settings) as optimizer:
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
        for _ in range(3):
            optimizer.step()
        kept = sum(
            each.nbytes
            for state in optimizer.state.values()
            for each in state.values()
            if isinstance(each, torch.Tensor)
        )
        return 4 * elements, kept, resident("VmHWM") - before


if __name__ == "__main__":
    with LocalServer() as small:
        take_steps(small.server, 400_000, sys.argv[3])  # loads what steps need
    print(*take_steps(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
