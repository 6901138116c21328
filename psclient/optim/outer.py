"""Outer: local steps with any torch optimizer, then one push of the difference (DiLoCo and SparseLoCo family)."""

import logging
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from psclient.compress.groups import ParamGroups, Rates, check_hyperparameters
from psclient.compress.method import Group, Recurrence
from psclient.engine.step import GradientSource
from psclient.errors import ConfigurationError
from psclient.model.module import TrainedModel
from psclient.optim.arguments import Density, Description, as_json, needs_closure, options_of
from psclient.optim.base import ParameterServerOptimizer
from psclient.optim.local_steps import Deltas, LocalSteps

log = logging.getLogger("psclient")

DEFAULT_OUTER: Description = ("SGD", {"lr": 0.7})


class Outer(ParameterServerOptimizer):
    """Outer: ``H`` steps on this machine, then the difference goes to the server, whose own optimizer takes a step.

    DiLoCo (Douillard et al., 2023; arXiv 2311.08105), and with a density below 1 SparseLoCo (arXiv 2508.15706). Per
    tensor, every ``H`` steps::

        Δ = θ_start − θ_local                       # the way of the inner optimizer, as a descent direction
        e = β·e + Δ
        send s = Q(p) of p = top ρ of |e|;  e[sent] = 0
        server: one step of the outer optimizer with s (per round: the mean of s) as its gradient
        θ_start = θ_local = what the server answers

    Asynchronous unless ``rounds`` is given: then the ways of several workers are added up, where a round takes their
    mean. The default is for that; DiLoCo has ``("SGD", {"lr": 0.7, "momentum": 0.9, "nesterov": True})`` with
    ``rounds=psclient.Rounds()``.

    In a training loop it stands where the inner optimizer stood; samples are counted at the calls of ``model``. The
    param groups are the inner optimizer's, so a rate set there is the inner one, and a scheduler may be built on
    either::

        inner = torch.optim.AdamW(model.parameters(), lr=3e-4)
        optimizer = psclient.Outer(inner, sync_every=50, model=model, server="host:50051", rounds=psclient.Rounds())

    Args:
        inner_optimizer: takes the local steps; everything that it trains is trained.
        outer_optimizer: the server's: a class of ``torch.optim`` by name, or by name and options, as ``("SGD",
            {"lr": 0.7})``; ``None`` for plain averaging. Momentum is for rounds.
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

    name: ClassVar[str] = "outer"
    default_density: ClassVar[float] = 1.0
    groups_are_agreed: ClassVar[bool] = True

    def __init__(
        self,
        inner_optimizer: Optimizer,
        outer_optimizer: Description | None = DEFAULT_OUTER,
        *,
        sync_every: int,
        density: Density | None = None,
        decay: float = 1.0,
        **connection: Any,
    ) -> None:
        if not isinstance(inner_optimizer, Optimizer):
            raise ConfigurationError(
                "Outer takes an optimizer, not parameters: "
                "psclient.Outer(torch.optim.AdamW(model.parameters(), lr=3e-4), sync_every=50, ...)"
            )
        if needs_closure(type(inner_optimizer)):
            raise ConfigurationError(
                f"{type(inner_optimizer).__name__} recomputes the loss within a step, and Outer calls its step() "
                "without a closure; take an inner optimizer that steps on gradients, as torch.optim.AdamW"
            )
        optimizer, options = _described(outer_optimizer)
        if not isinstance(sync_every, int) or sync_every < 1:
            raise ConfigurationError(f"sync_every must be a number of local steps, at least 1, not {sync_every!r}")
        if not 0 <= decay <= 1:
            raise ConfigurationError(f"decay must be from 0 to 1, not {decay!r}")
        if connection.get("overlap"):
            raise ConfigurationError("overlap=True pushes gradients, and local steps push none; leave it out")
        if options.get("momentum") and connection.get("rounds") is None:
            log.warning(
                "momentum=%g without rounds: the server adds the local steps of all workers up, and momentum on top of "
                "that learns nothing with several; pass rounds=psclient.Rounds(), or leave momentum out",
                options["momentum"],
            )
        self.inner_optimizer = inner_optimizer
        self._lr = float(options.get("lr", options_of(optimizer)[1]))
        self.server_remembers = optimizer != "SGD" or bool(options.get("momentum"))
        self._deltas: Deltas = {}
        agreed = {
            "update": "torch",
            "optimizer": as_json({"name": optimizer, "options": dict(options)}, "options"),
            "period": str(sync_every),
            "decay": str(float(decay)),
        }
        wanted = ("params", "param_names")
        params = [{name: group[name] for name in wanted if name in group} for group in inner_optimizer.param_groups]
        super().__init__(params, {"decay": decay}, density, agreed, **connection)
        self._outer_groups, self.param_groups = self.param_groups, inner_optimizer.param_groups
        inner_optimizer.register_load_state_dict_post_hook(partial(_follow, weakref.ref(self)))
        self._steps = LocalSteps(
            inner_optimizer,
            sync_every,
            self._deltas,
            self._worker,
            self._stepper,
            self._model,
            self._groups,
            in_rounds=connection.get("rounds") is not None,
        )

    def agreed_settings(self) -> dict[str, str]:
        """The server steps all tensors alike."""
        trained = sorted(position for group in self.param_groups for position in self._model.positions_of(group))
        return super().agreed_settings() | {"groups": as_json([{"tensors": trained, "options": {}}], "param groups")}

    def sources(self, model: TrainedModel, groups: ParamGroups) -> tuple[GradientSource, Callable[[], Rates]]:
        """A push has the differences, which carry no rate."""
        return partial(_among, self._deltas), partial(Rates, 1.0)

    @property
    def lr(self) -> float:
        """Learning rate of the server's step, agreed by all workers; those of ``param_groups`` are the inner ones."""
        return self._lr

    def state_dict(self) -> dict[str, Any]:
        """Return the outer state as any method's, and the inner optimizer's under ``inner``.

        Local steps since the last push are not in it: a worker that resumes begins at the server's model.
        """
        return super().state_dict() | {"inner": self.inner_optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load both optimizers' states."""
        outer = {name: value for name, value in state_dict.items() if name != "inner"}
        if "inner" not in state_dict:
            raise ConfigurationError(
                "this state is another optimizer's: it has no inner; a state of the inner optimizer is for "
                "optimizer.inner_optimizer.load_state_dict()"
            )
        super().load_state_dict(outer)
        self._groups.assign(self._outer_groups)
        self.inner_optimizer.load_state_dict(state_dict["inner"])  # and with it the groups

    @staticmethod
    def recurrence(group: Group) -> Recurrence:
        """``e = β·e + Δ``; at ρ = 1 all of it is sent."""
        return Recurrence(retain=group["decay"], whole=group["density"] >= 1)


def _described(outer_optimizer: Description | None) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the options of an outer optimizer."""
    match outer_optimizer:
        case None:
            return "SGD", {"lr": 1.0}
        case str() as name:
            return name, {}
        case (str() as name, Mapping() as options):
            check_hyperparameters(options)
            return name, options
    raise ConfigurationError(
        'outer_optimizer= must be a name with options, as ("SGD", {"lr": 0.7}), or None for plain averaging, '
        f"not {outer_optimizer!r}"
    )


def _among(deltas: Deltas, positions: range) -> dict[int, torch.Tensor]:
    return {position: deltas[position] for position in positions if position in deltas}


def _follow(outer: "weakref.ref[Outer]", inner: Optimizer) -> None:
    """Set the groups of an outer optimizer to those that its inner one has loaded."""
    found = outer()
    if found is not None:
        found.param_groups = inner.param_groups
