"""The worker's side: optimizers that train through a parameter server, in an ordinary PyTorch loop.

>>> optimizer = psclient.DGS(model.parameters(), lr=0.1, budget=0.03, model=model, server="host:50051")

Names are loaded when they are first used, so that importing this package is fast and starts nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pscore.telemetry import named_log
from pscore.version import __version__

if TYPE_CHECKING:
    from psclient import errors as errors
    from psclient import schedules as schedules
    from psclient.budget import Budget as Budget
    from psclient.data.sampler import ElasticSampler as ElasticSampler
    from psclient.node.group import node_group as node_group
    from psclient.node.optimizer import NodeOptimizer as NodeOptimizer
    from psclient.optim.asgd import ASGD as ASGD
    from psclient.optim.dgc import DGC as DGC
    from psclient.optim.dgs import DGS as DGS
    from psclient.optim.gradient_dropping import GradientDropping as GradientDropping
    from psclient.optim.momentum_sgd import MomentumSGD as MomentumSGD
    from psclient.optim.outer import Outer as Outer
    from psclient.optim.server_adagrad import ServerAdagrad as ServerAdagrad
    from psclient.optim.server_optimizer import ServerOptimizer as ServerOptimizer
    from psclient.optim.server_rmsprop import ServerRMSprop as ServerRMSprop
    from psclient.optim.ssgd import SSGD as SSGD
    from psclient.optim.wagma import WAGMA as WAGMA
    from psclient.publisher.published import Published as Published
    from psclient.publisher.publisher import Publisher as Publisher
    from psclient.reader.directory_sink import DirectorySink as DirectorySink
    from psclient.reader.follower import Follower as Follower
    from psclient.reader.follower import follow as follow
    from psclient.reader.lag import Lag as Lag
    from psclient.reader.module_sink import ModuleSink as ModuleSink
    from psclient.reader.patch_sink import Patch as Patch
    from psclient.reader.patch_sink import PatchReceiver as PatchReceiver
    from psclient.reader.patch_sink import PatchSink as PatchSink
    from psclient.report import StepReport as StepReport
    from psclient.report import Totals as Totals
    from psclient.report import scalars as scalars
    from psclient.rounds import Rounds as Rounds
    from psclient.rpc.download import download as download
    from psclient.rpc.download import save as save
    from psclient.rpc.local_server import LocalServer as LocalServer
    from psclient.schedules import VersionClock as VersionClock
    from psclient.settings import ClientSettings as ClientSettings
    from psclient.settings import worker_index as worker_index
    from pscore.reader.cut import Cut as Cut

_NAMES = {
    "psclient.budget": ("Budget",),
    "psclient.data.sampler": ("ElasticSampler",),
    "psclient.node.group": ("node_group",),
    "psclient.node.optimizer": ("NodeOptimizer",),
    "psclient.optim.asgd": ("ASGD",),
    "psclient.optim.dgc": ("DGC",),
    "psclient.optim.dgs": ("DGS",),
    "psclient.optim.gradient_dropping": ("GradientDropping",),
    "psclient.optim.momentum_sgd": ("MomentumSGD",),
    "psclient.optim.outer": ("Outer",),
    "psclient.optim.server_adagrad": ("ServerAdagrad",),
    "psclient.optim.server_optimizer": ("ServerOptimizer",),
    "psclient.optim.server_rmsprop": ("ServerRMSprop",),
    "psclient.optim.ssgd": ("SSGD",),
    "psclient.optim.wagma": ("WAGMA",),
    "psclient.publisher.published": ("Published",),
    "psclient.publisher.publisher": ("Publisher",),
    "psclient.reader.directory_sink": ("DirectorySink",),
    "psclient.reader.follower": ("Follower", "follow"),
    "psclient.reader.lag": ("Lag",),
    "psclient.reader.module_sink": ("ModuleSink",),
    "psclient.reader.patch_sink": ("Patch", "PatchReceiver", "PatchSink"),
    "psclient.report": ("StepReport", "Totals", "scalars"),
    "psclient.rounds": ("Rounds",),
    "psclient.rpc.download": ("download", "save"),
    "psclient.rpc.local_server": ("LocalServer",),
    "psclient.schedules": ("VersionClock",),
    "psclient.settings": ("ClientSettings", "worker_index"),
    "pscore.reader.cut": ("Cut",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = ("errors", "schedules")

named_log.install("psclient", "pscore")

__all__ = [*_HOMES, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    """Load a public name from its module."""
    if name in _MODULES:
        return importlib.import_module(f"psclient.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'psclient' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return list(__all__)
