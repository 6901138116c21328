"""Outer: local steps with any torch optimizer, then one push of the difference (DiLoCo and SparseLoCo family)."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

from torch.optim import Optimizer

from psclient.compress.groups import check_hyperparameters
from psclient.compress.method import Group, Method, Recurrence
from psclient.errors import ConfigurationError
from psclient.optim.arguments import Density, Description, RoundsOptions, as_json, optimizer_name, options_of
from psclient.optim.local_optimizer import LocalOptimizer
from psclient.whole_numbers import whole_number

log = logging.getLogger("psclient")

DEFAULT_OUTER: Description = ("SGD", {"lr": 0.7})
_DELAYED = "DelayedNesterov"


def recurrence(group: Group) -> Recurrence:
    """``e = β·e + Δ``; at ρ = 1 all of it is sent."""
    return Recurrence(retain=group["decay"], whole=group["density"] >= 1)


METHOD = Method("outer", recurrence, default_density=1.0, groups_are_agreed=True)


class Outer(LocalOptimizer):
    """Outer: ``H`` steps on this machine, then the difference goes to the server, whose own optimizer takes a step.

    DiLoCo (Douillard et al., 2023; arXiv 2311.08105), and with a density below 1 SparseLoCo (arXiv 2508.15706), whose
    outer optimizer has no momentum: ``outer_optimizer=None``. Per tensor, every ``H`` steps::

        Δ = θ_start − θ_local                       # the way of the inner optimizer, as a descent direction
        e = β·e + Δ
        send s = Q(p) of p = top ρ of |e|;  e[sent] = 0
        server: one step of the outer optimizer with s (per round: the mean of s) as its gradient
        θ_start = θ_local = what the server answers

    Asynchronous unless ``rounds`` is given: then the ways of several workers are added up, while a round takes their
    mean. The default is for that; DiLoCo has ``("SGD", {"lr": 0.7, "momentum": 0.9, "nesterov": True})`` with
    ``rounds=psclient.Rounds()``. Momentum without rounds is ``("DelayedNesterov", {"lr": 0.7, "momentum": 0.9,
    "every": W})`` for ``W`` workers (Liu et al., 2024; arXiv 2401.09135): each push counts a ``W``-th at once, and
    every ``W``-th renews the momentum.

    In a training loop it stands where the inner optimizer stood; samples are counted at the calls of ``model``. The
    param groups are the inner optimizer's, so a rate set there is the inner one, and a scheduler may be built on
    either::

        inner = torch.optim.AdamW(model.parameters(), lr=3e-4)
        optimizer = psclient.Outer(inner, sync_every=50, model=model, server="host:50051", rounds=psclient.Rounds())

    Args:
        inner_optimizer: takes the local steps; everything that it trains is trained.
        outer_optimizer: the server's: a class of ``torch.optim`` or its name, or one of these with options, as
            ``(torch.optim.SGD, {"lr": 0.7})``, or ``"DelayedNesterov"``; ``None`` for plain averaging.
        sync_every: ``H``, local steps from one push to the next.
        density: ``ρ``; a number, or a function of the number of the push.
        decay: ``β``, the share of the last push's error that is kept; 1 loses nothing.
        **connection: see :class:`~psclient.optim.base.ParameterServerOptimizer`; without ``overlap``.

    Raises:
        ConfigurationError: a value is out of its range, or the inner optimizer cannot step without a closure; in
            ``step()``, ``samples`` is given.
        NonFiniteGradientError: in ``step()``: the local steps have led to a parameter that is not finite; they are
            undone.
        RefusedError: the server does not know the outer optimizer, or torch does not take the options.
    """

    _method = METHOD

    def __init__(
        self,
        inner_optimizer: Optimizer,
        outer_optimizer: Description | None = DEFAULT_OUTER,
        *,
        sync_every: int,
        density: Density | None = None,
        decay: float = 1.0,
        **connection: Unpack[RoundsOptions],
    ) -> None:
        optimizer, options = _described(outer_optimizer)
        sync_every = whole_number(sync_every, "sync_every must be a number of local steps", 1)
        if not isinstance(decay, int | float) or not 0 <= decay <= 1:
            raise ConfigurationError(f"decay must be from 0 to 1, not {decay!r}")
        averages, is_delayed = connection.get("rounds") is not None, optimizer == _DELAYED
        if is_delayed and (averages or options.keys() != {"lr", "momentum", "every"}):
            raise ConfigurationError(
                f'{_DELAYED} is for workers without rounds, with {{"lr": 0.7, "momentum": 0.9, "every": 4}} for 4 '
                f"workers; with rounds it is SGD with nesterov; the options are {dict(options)!r}"
            )
        if options.get("momentum") and not averages and not is_delayed:
            log.warning(
                "momentum=%g without rounds: the server adds the local steps of all workers up, and momentum on top of "
                "that learns nothing with several; pass rounds=psclient.Rounds(), or outer_optimizer=(%r, …)",
                options["momentum"],
                _DELAYED,
            )
        self._lr = float(options["lr"] if "lr" in options else options_of(optimizer)[1])
        self._method = replace(METHOD, server_remembers=optimizer != "SGD" or bool(options.get("momentum")))
        agreed = {
            "update": "delayed_nesterov" if is_delayed else "torch",
            "optimizer": as_json({"name": optimizer, "options": dict(options)}, "options"),
            "period": str(sync_every),
            "decay": str(float(decay)),
        }
        averages |= is_delayed
        super().__init__(
            inner_optimizer, sync_every, {"decay": decay}, density, agreed, averages=averages, **connection
        )

    def _agreed_settings(self) -> dict[str, str]:
        """The server steps all tensors alike."""
        trained = sorted(position for group in self.param_groups for position in self._model.positions_of(group))
        return super()._agreed_settings() | {"groups": as_json([{"tensors": trained, "options": {}}], "param groups")}

    @property
    def lr(self) -> float:
        """Learning rate of the server's step, agreed by all workers; those of ``param_groups`` are the inner ones."""
        return self._lr


def _described(outer_optimizer: Description | None) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the options of an outer optimizer."""
    match outer_optimizer:
        case None:
            return "SGD", {"lr": 1.0}
        case (str() | type() as kind, Mapping() as options):
            check_hyperparameters(options)
            return optimizer_name(kind, "outer_optimizer="), options
        case str() | type() as kind:
            return optimizer_name(kind, "outer_optimizer="), {}
    raise ConfigurationError(
        'outer_optimizer= must be a class of torch.optim with options, as ("SGD", {"lr": 0.7}), or None for plain '
        f"averaging, not {outer_optimizer!r}"
    )
