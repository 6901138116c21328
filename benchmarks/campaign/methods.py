"""The methods that are compared: how a worker makes its optimizer, and what its server is told.

Adding a method is adding an entry. Every method gets the same number of samples, the same learning-rate search, and, if
it sends a selection, the same density.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

import psclient
from psclient.optim.base import ParameterServerOptimizer

Kind = Literal["single", "asynchronous", "synchronous"]


@dataclass(frozen=True, slots=True)
class Setup:
    """What an optimizer is made of.

    Attributes:
        model: what it trains.
        rate: the method's learning rate, momentum not yet taken into account.
        momentum: its momentum.
        size: ``density`` or ``budget`` of a sparse method.
        steps: of each worker.
        workers: how many there are.
        connection: the keywords that every method takes: server, worker's name, settings.
    """

    model: nn.Module
    rate: float
    momentum: float
    size: Mapping[str, Any]
    steps: int
    workers: int
    connection: Mapping[str, Any] = field(default_factory=dict)


class Made(NamedTuple):
    """An optimizer, and the one whose learning rate the worker's schedule moves; ``None`` where the server has it."""

    optimizer: torch.optim.Optimizer
    scheduled: torch.optim.Optimizer | None


@dataclass(frozen=True, slots=True)
class Method:
    """One entry.

    Attributes:
        key: its name in settings and files.
        title: its name for readers.
        make: see :class:`Setup` and :class:`Made`.
        momenta: to search among; the first is the one that the learning rate is searched with.
        kind: single (no server), asynchronous or synchronous.
        ahead: gradients are computed inside ``lookahead()``.
        rate_scale: what the task's rates are multiplied by, for a method whose rate is on another scale than SGD's.
        server: settings of its server, by the number of workers.
    """

    key: str
    title: str
    make: Callable[[Setup], Made]
    momenta: tuple[float, ...] = (0.6, 0.3, 0.9)
    kind: Kind = "asynchronous"
    rate_scale: float = 1.0
    ahead: bool = False
    server: Callable[[int], dict[str, object]] = field(default=lambda workers: {})

    @property
    def waits(self) -> bool:
        """Tell whether its workers wait for one another."""
        return self.kind == "synchronous" or self.key == "wagma"


def _scheduled(optimizer: torch.optim.Optimizer) -> Made:
    return Made(optimizer, optimizer)


def _sgd(setup: Setup) -> Made:
    return _scheduled(psclient.MomentumSGD(setup.model.parameters(), setup.rate, setup.momentum))


def _asgd(setup: Setup) -> Made:
    return _scheduled(
        psclient.ASGD(setup.model.parameters(), setup.rate, setup.momentum, model=setup.model, **setup.connection)
    )


def _gradient_dropping(setup: Setup) -> Made:
    return _scheduled(
        psclient.GradientDropping(
            setup.model.parameters(), setup.rate, **setup.size, model=setup.model, **setup.connection
        )
    )


def _server_rmsprop(setup: Setup) -> Made:
    return _scheduled(
        psclient.ServerRMSprop(
            setup.model.parameters(), setup.rate, **setup.size, model=setup.model, **setup.connection
        )
    )


def _with_momentum(method: Callable[..., ParameterServerOptimizer]) -> Callable[[Setup], Made]:
    def make(setup: Setup) -> Made:
        return _scheduled(
            method(
                setup.model.parameters(),
                setup.rate,
                setup.momentum,
                **setup.size,
                model=setup.model,
                **setup.connection,
            )
        )

    return make


def in_rounds(rounds: psclient.Rounds) -> Callable[[Setup], Made]:
    """Return what makes an SSGD optimizer with these rounds."""

    def make(setup: Setup) -> Made:
        return _scheduled(
            psclient.SSGD(
                setup.model.parameters(),
                setup.rate,
                setup.momentum,
                rounds=rounds,
                model=setup.model,
                **setup.connection,
            )
        )

    return make


def _on_server(name: str, options: Callable[[Setup], dict[str, Any]]) -> Callable[[Setup], Made]:
    """Return what makes one of torch's optimizers on the server; it has the schedule: the same rise and fall."""

    def make(setup: Setup) -> Made:
        versions = setup.steps * setup.workers
        rise = max(1, versions // 10)
        schedule = (
            "SequentialLR",
            {"milestones": [rise]},
            [
                ("LinearLR", {"start_factor": 1 / rise, "total_iters": rise}),
                ("CosineAnnealingLR", {"T_max": max(1, versions - rise)}),
            ],
        )
        optimizer = psclient.ServerOptimizer(
            setup.model.parameters(),
            name,
            options(setup),
            scheduler=schedule,
            **setup.size,
            model=setup.model,
            **setup.connection,
        )
        return Made(optimizer, None)

    return make


def _outer(sparse: bool) -> Callable[[Setup], Made]:
    def make(setup: Setup) -> Made:
        inner = torch.optim.SGD(setup.model.parameters(), setup.rate, setup.momentum)
        optimizer = psclient.Outer(
            inner,
            None if sparse else DILOCO,
            sync_every=OUTER_PERIOD,
            **(setup.size if sparse else {}),
            rounds=psclient.Rounds(),
            model=setup.model,
            **setup.connection,
        )
        return Made(optimizer, inner)

    return make


def in_groups(tau: int) -> Callable[[Setup], Made]:
    """Return what makes a WAGMA-SGD optimizer with this period of its global rounds."""

    def make(setup: Setup) -> Made:
        inner = torch.optim.SGD(setup.model.parameters(), setup.rate, setup.momentum)
        return Made(psclient.WAGMA(inner, tau=tau, model=setup.model, **setup.connection), inner)

    return make


DILOCO = ("SGD", {"lr": 0.7, "momentum": 0.9, "nesterov": True})
"""Of dense pushes; sparse ones have no momentum beside their residuals, as SparseLoCo has it."""

OUTER_PERIOD = 8
"""Local steps between two pushes; the numbers of steps of a run are multiples of it."""

METHODS = {
    method.key: method
    for method in (
        Method("sgd", "SGD, one node", _sgd, kind="single"),
        Method("dgs", "DGS", _with_momentum(psclient.DGS)),
        Method("dgc", "DGC", _with_momentum(psclient.DGC)),
        Method("gradient_dropping", "Gradient Dropping", _gradient_dropping, momenta=(0.0,)),
        Method("dgs_ahead", "DGS, lookahead", _with_momentum(psclient.DGS), ahead=True),
        Method("dgc_ahead", "DGC, lookahead", _with_momentum(psclient.DGC), ahead=True),
        Method("dropping_ahead", "Gradient Dropping, lookahead", _gradient_dropping, momenta=(0.0,), ahead=True),
        Method("asgd", "ASGD", _asgd, momenta=(0.0, 0.3, 0.6)),
        Method(
            "dc_asgd",
            "DC-ASGD",
            _asgd,
            momenta=(0.0, 0.3, 0.6),
            # A dense push overwrites everything, and what it overwrote is needed for as long as a worker's base is old.
            server=lambda workers: {"delay_compensation": 0.04, "ledger_multiple": 4.0 * workers},
        ),
        Method("ssgd", "SSGD", in_rounds(psclient.Rounds()), kind="synchronous"),
        Method(
            "rmsprop",
            "RMSprop on the server",
            _server_rmsprop,
            momenta=(0.0,),
            rate_scale=0.01,
        ),
        Method(
            "adam",
            "Adam on the server",  # its first moment is a mean, which makes no step longer
            _on_server(
                "Adam",
                lambda setup: {"lr": setup.rate / (1 - setup.momentum), "betas": [float(setup.momentum), 0.99]},
            ),
            momenta=(0.0, 0.5),
            rate_scale=0.01,
        ),
        Method("outer", f"Outer, {OUTER_PERIOD} local steps", _outer(sparse=False), kind="synchronous"),
        Method("outer_sparse", f"Outer, {OUTER_PERIOD} local steps, sparse", _outer(sparse=True), kind="synchronous"),
        Method("wagma", "WAGMA-SGD", in_groups(tau=10)),
    )
}
"""All methods by key."""

SUBJECT = "dgs"
"""The method that the others are held against."""
