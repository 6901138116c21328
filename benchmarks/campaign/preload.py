"""What a server and a worker load and compile, done once in the process that they are forked from.

Importing this module does it, which is what the start of that process asks of it. No thread is started and no backward
pass is run: both would be lost, or lame, in a fork.
"""

import torch

import psservice.process.server  # noqa: F401  (is here for its imports, as is the one below)
from benchmarks.campaign import worker  # noqa: F401
from benchmarks.campaign.tasks import TASKS
from psclient.compress.gradients import finite
from psclient.compress.groups import ParamGroups
from psclient.compress.host_table import Choice
from psclient.compress.selector import Grouping, Selector
from psclient.model.module import describe
from psclient.model.replica import Replica
from psclient.optim.dgs import METHOD
from psclient.report import StepReport
from pscore.selection import DEFAULT_SELECTOR, SELECTORS
from pscore.warmup import warm_up

_SIZE = 1 << 15


def _load() -> None:
    torch.set_num_threads(1)
    warm_up()
    parameter = torch.nn.Parameter(torch.zeros(_SIZE))
    group = {"params": [parameter], "lr": 0.1, "momentum": 0.5, "weight_decay": 0.0, "density": 0.1}
    model, choice = describe(None, [group]), Choice(SELECTORS[DEFAULT_SELECTOR], 0)
    groups = ParamGroups([group])
    groups.read()
    compressor = Selector(METHOD, model, {parameter: {}}, groups, choice, Grouping(model.layout, 1))
    gradients, replica = finite(model, {0: torch.linspace(-1, 1, _SIZE)}), Replica(model.layout, model.parameters)
    for _ in range(2):
        sent = compressor.compress(range(1), gradients, 1.0, StepReport(0)).slices
        with torch.no_grad():
            replica.write(sent)
            replica.add(sent)
    for task in (task for task in TASKS.values() if task.is_here()):
        torch.optim.SGD(task.make_model().parameters(), 0.1)  # the first optimizer imports a second's worth of torch
        next(task.draws(0, 0, 1))
        task.held_out(False)


_load()
