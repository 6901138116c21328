"""The worker's side: optimizers that train through a parameter server, in an ordinary PyTorch loop.

>>> optimizer = psclient.DGS(model.parameters(), lr=0.1, density=0.01, model=model, server="host:50051")

Names are loaded when they are first used, so that importing this package is fast and starts nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pscore.version import __version__

if TYPE_CHECKING:
    from psclient import errors, schedules
    from psclient.data.sampler import ElasticSampler
    from psclient.node.group import node_group
    from psclient.node.optimizer import NodeOptimizer
    from psclient.optim.asgd import ASGD
    from psclient.optim.dgc import DGC
    from psclient.optim.dgs import DGS
    from psclient.optim.gradient_dropping import GradientDropping
    from psclient.optim.momentum_sgd import MomentumSGD
    from psclient.optim.outer import Outer
    from psclient.optim.server_optimizer import ServerOptimizer
    from psclient.optim.ssgd import SSGD
    from psclient.optim.wagma import WAGMA
    from psclient.report import StepReport, Totals, scalars
    from psclient.rounds import Rounds
    from psclient.rpc.download import download, save
    from psclient.rpc.local_server import LocalServer
    from psclient.schedules import VersionClock
    from psclient.settings import ClientSettings, worker_index

_HOMES = {
    "ASGD": "psclient.optim.asgd",
    "DGC": "psclient.optim.dgc",
    "DGS": "psclient.optim.dgs",
    "GradientDropping": "psclient.optim.gradient_dropping",
    "MomentumSGD": "psclient.optim.momentum_sgd",
    "Outer": "psclient.optim.outer",
    "Rounds": "psclient.rounds",
    "SSGD": "psclient.optim.ssgd",
    "ServerOptimizer": "psclient.optim.server_optimizer",
    "StepReport": "psclient.report",
    "Totals": "psclient.report",
    "WAGMA": "psclient.optim.wagma",
    "ClientSettings": "psclient.settings",
    "ElasticSampler": "psclient.data.sampler",
    "LocalServer": "psclient.rpc.local_server",
    "NodeOptimizer": "psclient.node.optimizer",
    "VersionClock": "psclient.schedules",
    "download": "psclient.rpc.download",
    "node_group": "psclient.node.group",
    "save": "psclient.rpc.download",
    "scalars": "psclient.report",
    "worker_index": "psclient.settings",
}
_MODULES = ("errors", "schedules")

__all__ = [
    "ASGD",
    "DGC",
    "DGS",
    "SSGD",
    "WAGMA",
    "ClientSettings",
    "ElasticSampler",
    "GradientDropping",
    "LocalServer",
    "MomentumSGD",
    "NodeOptimizer",
    "Outer",
    "Rounds",
    "ServerOptimizer",
    "StepReport",
    "Totals",
    "VersionClock",
    "__version__",
    "download",
    "errors",
    "node_group",
    "save",
    "scalars",
    "schedules",
    "worker_index",
]


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
