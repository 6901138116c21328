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


def _ours(
    method: Callable[..., ParameterServerOptimizer], *, momentum: bool = False, sparse: bool = True, **options: Any
) -> Callable[[Setup], Made]:
    """Return what makes an optimizer of this library, with a momentum and a size if it takes them."""

    def make(setup: Setup) -> Made:
        given = {**({"momentum": setup.momentum} if momentum else {}), **(setup.size if sparse else {}), **options}
        return _scheduled(method(setup.model.parameters(), setup.rate, **given, model=setup.model, **setup.connection))

    return make


def _on_server(
    name: str, options: Callable[[Setup], dict[str, Any]], rounds: psclient.Rounds | None = None
) -> Callable[[Setup], Made]:
    """Return what makes one of torch's optimizers on the server; it has the schedule: the same rise and fall."""

    def make(setup: Setup) -> Made:
        versions = setup.steps * (setup.workers if rounds is None else 1)
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
            rounds=rounds,
            **setup.size,
            model=setup.model,
            **setup.connection,
        )
        return Made(optimizer, None)

    return make


def _outer(
    inner_of: Callable[[Setup], torch.optim.Optimizer], period: int, outer_optimizer: Any = None, *, sparse: bool = True
) -> Callable[[Setup], Made]:
    """Return what makes ``Outer`` in rounds, with this many local steps between two pushes; averages are plain ones
    unless an outer optimizer is given.
    """

    def make(setup: Setup) -> Made:
        inner = inner_of(setup)
        optimizer = psclient.Outer(
            inner,
            outer_optimizer,
            sync_every=period,
            **(setup.size if sparse else {}),
            rounds=psclient.Rounds(),
            model=setup.model,
            **setup.connection,
        )
        return Made(optimizer, inner)

    return make


def _inner_sgd(setup: Setup) -> torch.optim.Optimizer:
    return torch.optim.SGD(setup.model.parameters(), setup.rate, setup.momentum)


def _inner_adamw(setup: Setup) -> torch.optim.Optimizer:
    return torch.optim.AdamW(setup.model.parameters(), setup.rate)


def _in_groups(tau: int) -> Callable[[Setup], Made]:
    """Return what makes a WAGMA-SGD optimizer with this period of its global rounds."""

    def make(setup: Setup) -> Made:
        inner = _inner_sgd(setup)
        return Made(psclient.WAGMA(inner, tau=tau, model=setup.model, **setup.connection), inner)

    return make


DILOCO = ("SGD", {"lr": 0.7, "momentum": 0.9, "nesterov": True})
"""Of dense pushes; sparse ones have no momentum beside their residuals, as SparseLoCo has it."""

OUTER_PERIOD = 8
"""Local steps between two pushes; the numbers of steps of a run are multiples of it."""

LOCAL_PERIODS = (10, 4, 2, 1)
"""Likewise, of AdamW on the workers."""

METHODS = {
    method.key: method
    for method in (
        Method("sgd", "SGD, one node", _sgd, kind="single"),
        Method("dgs", "DGS", _ours(psclient.DGS, momentum=True)),
        Method("dgc", "DGC", _ours(psclient.DGC, momentum=True)),
        Method("gradient_dropping", "Gradient Dropping", _ours(psclient.GradientDropping), momenta=(0.0,)),
        Method("dgs_ahead", "DGS, lookahead", _ours(psclient.DGS, momentum=True), ahead=True),
        Method("dgc_ahead", "DGC, lookahead", _ours(psclient.DGC, momentum=True), ahead=True),
        Method(
            "dropping_ahead",
            "Gradient Dropping, lookahead",
            _ours(psclient.GradientDropping),
            momenta=(0.0,),
            ahead=True,
        ),
        Method("asgd", "ASGD", _ours(psclient.ASGD, momentum=True, sparse=False), momenta=(0.0, 0.3, 0.6)),
        Method(
            "dc_asgd",
            "DC-ASGD",
            _ours(psclient.ASGD, momentum=True, sparse=False),
            momenta=(0.0, 0.3, 0.6),
            # A dense push overwrites everything, and what it overwrote is needed for as long as a worker's base is old.
            server=lambda workers: {"delay_compensation": 0.04, "ledger_multiple": 4.0 * workers},
        ),
        Method(
            "ssgd",
            "SSGD",
            _ours(psclient.SSGD, momentum=True, sparse=False, rounds=psclient.Rounds()),
            kind="synchronous",
        ),
        Method(
            "rmsprop",
            "RMSprop on the server",
            _ours(psclient.ServerRMSprop),
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
        Method(
            "rmsprop_rounds",
            "RMSprop on the server, in rounds",
            _ours(psclient.ServerRMSprop, rounds=psclient.Rounds()),
            momenta=(0.0,),
            kind="synchronous",
            rate_scale=0.01,
        ),
        Method(
            "adamw_rounds",
            "AdamW, data parallel",
            _on_server("AdamW", lambda setup: {"lr": setup.rate}, psclient.Rounds()),
            momenta=(0.0,),
            kind="synchronous",
            rate_scale=0.01,
        ),
        Method(
            "outer",
            f"Outer, {OUTER_PERIOD} local steps",
            _outer(_inner_sgd, OUTER_PERIOD, DILOCO, sparse=False),
            kind="synchronous",
        ),
        Method(
            "outer_sparse",
            f"Outer, {OUTER_PERIOD} local steps, sparse",
            _outer(_inner_sgd, OUTER_PERIOD),
            kind="synchronous",
        ),
        *(
            Method(
                f"local_{period}",
                f"Outer, {period} local steps of AdamW",
                _outer(_inner_adamw, period),
                (0.0,),
                kind="synchronous",
                rate_scale=0.01,
            )
            for period in LOCAL_PERIODS
        ),
        Method(
            "diloco_10",
            "DiLoCo, 10 local steps of AdamW",
            _outer(_inner_adamw, 10, DILOCO),
            (0.0,),
            kind="synchronous",
            rate_scale=0.01,
        ),
        Method("wagma", "WAGMA-SGD", _in_groups(tau=10)),
        Method(
            "asgd_bounded",
            "ASGD, --ssp-bound 4",
            _ours(psclient.ASGD, momentum=True, sparse=False),
            (0.0,),
            server=lambda workers: {"ssp_bound": 4},
        ),
        Method(
            "ssgd_backup",
            "SSGD, 3 of 4",
            _ours(psclient.SSGD, momentum=True, sparse=False, rounds=psclient.Rounds(quorum=3)),
            kind="synchronous",
        ),
        Method("wagma_rare", "WAGMA-SGD, τ = 1000", _in_groups(tau=1000)),
    )
}
"""All methods by key."""

VARIANTS = {"asgd_bounded": "asgd", "ssgd_backup": "ssgd", "wagma_rare": "wagma"}
"""What is timed beside a slow worker alone: a bound, a backup worker, rarer global rounds; and what it varies."""

SUBJECT = "dgs"
"""The method that the others are held against."""
