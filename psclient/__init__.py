"""The worker's side: optimizers that train through a parameter server, in an ordinary PyTorch loop.

>>> optimizer = psclient.DGS(model.parameters(), lr=0.1, density=0.01, model=model, server="host:50051")

Names are loaded when they are first used, so that importing this package is fast and starts nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pscore.version import __version__

if TYPE_CHECKING:
    from psclient import errors, schedules
    from psclient.export import download, save
    from psclient.local import LocalServer
    from psclient.methods.asgd import ASGD
    from psclient.methods.dgc import DGC
    from psclient.methods.dgs import DGS
    from psclient.methods.gradient_dropping import GradientDropping
    from psclient.methods.momentum_sgd import MomentumSGD
    from psclient.methods.outer import Outer
    from psclient.methods.server_optimizer import ServerOptimizer
    from psclient.methods.ssgd import SSGD
    from psclient.methods.wagma import WAGMA
    from psclient.node import NodeOptimizer
    from psclient.nodegroup import node_group
    from psclient.report import StepReport, Totals, scalars
    from psclient.rounds import Rounds
    from psclient.sampler import ElasticSampler
    from psclient.schedules import VersionClock
    from psclient.settings import ClientSettings, worker_index

_HOMES = {
    "ASGD": "psclient.methods.asgd",
    "DGC": "psclient.methods.dgc",
    "DGS": "psclient.methods.dgs",
    "GradientDropping": "psclient.methods.gradient_dropping",
    "MomentumSGD": "psclient.methods.momentum_sgd",
    "Outer": "psclient.methods.outer",
    "Rounds": "psclient.rounds",
    "SSGD": "psclient.methods.ssgd",
    "ServerOptimizer": "psclient.methods.server_optimizer",
    "StepReport": "psclient.report",
    "Totals": "psclient.report",
    "WAGMA": "psclient.methods.wagma",
    "ClientSettings": "psclient.settings",
    "ElasticSampler": "psclient.sampler",
    "LocalServer": "psclient.local",
    "NodeOptimizer": "psclient.node",
    "VersionClock": "psclient.schedules",
    "download": "psclient.export",
    "node_group": "psclient.nodegroup",
    "save": "psclient.export",
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
