"""What a server and a worker load and compile, done once in the process that they are forked from.

Importing this module does it, which is what the start of that process asks of it. No thread is started and no backward
pass is run: both would be lost, or lame, in a fork.
"""

import torch

import psservice.app.server  # noqa: F401  (is here for its imports, as is the one below)
from benchmarks.compare import worker  # noqa: F401
from benchmarks.compare.tasks import TASKS
from pscore.select.kernels import kernels_for
from pscore.select.kernels.base import GradientUpdate
from pscore.warmup import warm_up

_SIZE = 8192


def _load() -> None:
    torch.set_num_threads(1)
    warm_up()
    memory, gradient = torch.zeros(_SIZE), torch.linspace(-1, 1, _SIZE)
    kernels = kernels_for(memory)
    for added in (
        GradientUpdate(gradient, 1.0),
        GradientUpdate(gradient, 1.0, momentum=torch.zeros(_SIZE), factor=0.5),
    ):
        kernels.take(memory, added, 0.5, 0.5, _SIZE)
    kernels.take(memory, None, 0.5, 0.5, _SIZE)
    for task in TASKS.values():
        torch.optim.SGD(task.make_model().parameters(), 0.1)  # the first optimizer imports a second's worth of torch
        next(task.draws(0, 0, 1))
        task.held_out(False)


_load()
