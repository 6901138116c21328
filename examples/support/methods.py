"""Every training method by its name on the command line, with the learning-rate schedule where that method has it."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import lr_scheduler

import psclient
from psclient.optim.base import ParameterServerOptimizer

from .launch import Place, at_least

METHODS = (
    "dgs",
    "dgc",
    "gradient-dropping",
    "asgd",
    "ssgd",
    "wagma",
    "server-optimizer",
    "outer",
    "momentum-sgd",
)
MOMENTA = {"dgs": 0.7, "dgc": 0.7, "outer": 0.5, "asgd": 0.0}  # asynchrony adds momentum of its own


class Clock(Protocol):
    """What is stepped after each step of the optimizer."""

    def step(self) -> None:
        """Move the learning rate on."""

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on there."""


@dataclass(frozen=True)
class Length:
    """How long a training is, in the workers' steps together.

    Attributes:
        epochs: passes over the data.
        steps_per_epoch: batches in the data.
        warmup_epochs: in which the rate grows from next to nothing.
        drops: epochs after which ``step`` takes a tenth of the rate; none are a half and three quarters of the run.
    """

    epochs: int
    steps_per_epoch: int
    warmup_epochs: float
    drops: tuple[float, ...] = ()

    @classmethod
    def of(cls, options: argparse.Namespace, batches: int) -> "Length":
        """Take the options; ``batches`` are in the data."""
        return cls(options.epochs, max(1, batches), options.warmup_epochs, tuple(options.step_epochs))

    def versions(self, steps_per_version: int = 1) -> int:
        """Return the version that the server's model ends with."""
        return max(1, self.epochs * self.steps_per_epoch // steps_per_version)

    def schedule(self, kind: str, steps_per_version: int) -> tuple[Any, ...]:
        """Describe a learning-rate schedule over versions of the server's model, as ``ServerOptimizer`` takes it."""
        total = self.versions(steps_per_version)
        warmup = min(total - 1, round(self.warmup_epochs * self.steps_per_epoch / steps_per_version))
        if kind == "step":
            epochs = self.drops or (self.epochs / 2, self.epochs * 3 / 4)
            drops = [round(epoch * self.steps_per_epoch / steps_per_version) - warmup for epoch in epochs]
            main = ("MultiStepLR", {"milestones": drops, "gamma": 0.1})
        else:
            main = ("CosineAnnealingLR", {"T_max": total - warmup})
        if warmup < 1:
            return main
        start = ("LinearLR", {"start_factor": 1 / (warmup + 1), "total_iters": warmup})
        return ("SequentialLR", {"milestones": [warmup]}, [start, main])


def add_arguments(parser: argparse.ArgumentParser, lr: float, batch_size: int, epochs: int) -> None:
    """Add the options of methods and of their learning rates."""
    group = parser.add_argument_group("how it learns")
    group.add_argument("--method", choices=METHODS, default="dgs", help="default: %(default)s")
    group.add_argument("--lr", type=float, default=lr, metavar="X", help="default: %(default)s")
    group.add_argument("--momentum", type=float, metavar="X", help="default: by method")
    group.add_argument("--weight-decay", type=float, default=5e-4, metavar="X", help="default: %(default)s")
    size = group.add_mutually_exclusive_group()
    size.add_argument(
        "--budget", type=float, metavar="X", help="share of the dense bytes each way (default: 0.03 of sparse methods)"
    )
    size.add_argument("--density", type=float, metavar="X", help="share of the entries that is pushed")
    group.add_argument("--no-density-warmup", action="store_true", help="dgc pushes --density from the first step on")
    group.add_argument("--server-optimizer", default="SGD", metavar="NAME", help="of torch.optim (default: SGD)")
    group.add_argument("--period", type=at_least(1), default=50, metavar="N", help="local steps of outer (default: 50)")
    group.add_argument(
        "--batch-size", type=at_least(1), default=batch_size, metavar="N", help="each worker's (default: %(default)s)"
    )
    group.add_argument("--epochs", type=at_least(0), default=epochs, metavar="N", help="default: %(default)s")
    group.add_argument("--schedule", choices=("cosine", "step"), default="cosine", help="default: %(default)s")
    group.add_argument(
        "--step-epochs", type=float, nargs="+", default=[], metavar="X", help="where step drops (default: 1/2 and 3/4)"
    )
    group.add_argument("--warmup-epochs", type=float, default=5.0, metavar="X", help="default: %(default)s")
    group.add_argument("--overlap", action="store_true", help="push while backward goes on")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")


def make_optimizer(
    options: argparse.Namespace, model: nn.Module, place: Place, length: Length
) -> tuple[torch.optim.Optimizer, Clock]:
    """Make the optimizer that the options name, and what moves its learning rate.

    The schedule follows the server's version: a fleet that grows, shrinks or starts again is where the training is.

    Raises:
        SparsepsError: as :class:`psclient.optim.base.ParameterServerOptimizer`.
    """
    name, parameters = options.method, model.parameters()
    momentum = MOMENTA.get(name, 0.9) if options.momentum is None else options.momentum
    size: dict[str, Any] = {"budget": options.budget} if options.density is None else {"density": options.density}
    rates: dict[str, Any] = {"lr": options.lr, "momentum": momentum, "weight_decay": options.weight_decay}
    joined: dict[str, Any] = {"model": model, "server": place.server, "worker": place.worker}
    streamed: dict[str, Any] = joined | {"overlap": options.overlap}

    def schedule(optimizer: torch.optim.Optimizer, steps_per_version: int = 1) -> Any:
        return build(length.schedule(options.schedule, steps_per_version), optimizer)

    if name == "momentum-sgd":  # at home, without a server
        if place.workers > 1:
            raise psclient.errors.ConfigurationError("momentum-sgd trains on one machine: --workers 1")
        alone = psclient.MomentumSGD(parameters, **rates)
        return alone, schedule(alone)
    if name == "outer":
        inner = torch.optim.SGD(parameters, lr=options.lr, momentum=0.9, weight_decay=options.weight_decay)
        step = outer_step(momentum)
        outer = psclient.Outer(inner, step, sync_every=options.period, **size, **joined)
        return outer, psclient.VersionClock(schedule(inner, options.period), outer)
    if name == "server-optimizer":
        chosen = {"lr": options.lr, "weight_decay": options.weight_decay}
        if options.server_optimizer in ("SGD", "RMSprop"):
            chosen["momentum"] = momentum
        described = length.schedule(options.schedule, 1)
        server_side = psclient.ServerOptimizer(
            parameters, options.server_optimizer, chosen, scheduler=described, **size, **streamed
        )
        return server_side, STILL
    if name == "ssgd":
        rounds = psclient.Rounds(start_workers=place.workers)
        synchronous = psclient.SSGD(parameters, **rates, **size, rounds=rounds, **streamed)
        return synchronous, psclient.VersionClock(schedule(synchronous, place.workers), synchronous)
    if name == "dgc" and options.density is not None and not options.no_density_warmup:
        size["density"] = psclient.schedules.dgc_warmup(
            max(1, length.steps_per_epoch // place.workers), options.density
        )
    made: dict[str, Callable[[], ParameterServerOptimizer]] = {
        "dgs": lambda: psclient.DGS(parameters, **rates, **size, **streamed),
        "gradient-dropping": lambda: psclient.GradientDropping(
            parameters, lr=options.lr, weight_decay=options.weight_decay, **size, **streamed
        ),
        "dgc": lambda: psclient.DGC(parameters, **rates, **size, **streamed),
        "asgd": lambda: psclient.ASGD(parameters, **rates, budget=options.budget, **streamed),
        "wagma": lambda: psclient.WAGMA(torch.optim.SGD(parameters, **rates), **size, **joined),
    }
    optimizer = made[name]()
    return optimizer, psclient.VersionClock(schedule(optimizer), optimizer)


def outer_step(momentum: float) -> tuple[str, dict[str, Any]]:
    """Return the server's step along what local steps have done."""
    return ("SGD", {"lr": 0.7, "momentum": momentum, "nesterov": momentum > 0})


def is_finished(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether the server has ended the run."""
    return bool(getattr(optimizer, "finished", False))


def build(description: tuple[Any, ...], optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Make the scheduler that :meth:`Length.schedule` describes."""
    name, options, *parts = description
    if parts:
        options = {"schedulers": [build(part, optimizer) for part in parts[0]], **options}
    made: lr_scheduler.LRScheduler = getattr(lr_scheduler, name)(optimizer, **options)
    return made


class _Still:
    """The clock of a method whose schedule is on the server."""

    def step(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""


STILL = _Still()
