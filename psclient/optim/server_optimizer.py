"""Workers push gradients, and an optimizer on the server takes the steps: one of ``torch.optim``."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Unpack

from torch.optim.lr_scheduler import LRScheduler

from psclient.compress.groups import ParamGroups, Rates
from psclient.compress.method import Group, Method, Recurrence
from psclient.engine.engine import GradientSource
from psclient.errors import ConfigurationError, HyperparameterError
from psclient.model.module import TrainedModel
from psclient.optim.arguments import (
    Density,
    Kind,
    Options,
    Params,
    as_json,
    optimizer_name,
    options_of,
    scheduler_description,
    scheduler_interval,
)
from psclient.optim.base import ParameterServerOptimizer
from pscore.wire.messages import LARGEST_RATE

log = logging.getLogger("psclient")

_WORKERS_OWN = frozenset(
    {"params", "param_names", "name", "density", "lr_scale", "initial_lr", "max_lr", "min_lr"}
    | {"swa_lr", "fused", "foreach", "capturable", "differentiable"}
)
"""Keys of param groups that the server does not use: names, state of schedulers, ways to compute."""


def recurrence(group: Group) -> Recurrence:
    """``r += g``; at ρ = 1 all of ``r`` is sent."""
    return Recurrence(whole=group["density"] >= 1)


METHOD = Method("server_optimizer", recurrence, default_density=1.0, server_remembers=True, groups_are_agreed=True)


class ServerOptimizer(ParameterServerOptimizer):
    """A ``torch.optim`` optimizer that runs on the server, on sparse or dense gradients, as they come or per round.

    Per tensor, on every worker::

        r += g
        send s = Q(p) of p = top ρ of |r|;  r[sent] = 0
        server: one step of the named optimizer with s (per round: the mean of s) as its gradient

    The optimizer's state lives on the server only, once for all workers, and is part of its snapshots. Absent entries
    of a sparse push are gradients of zero, so a step changes everything and replies are best cut to their largest
    differences, which the server's ``--down-mode auto`` does by itself then; ``lazy`` touches only what was sent.

    The param groups have the learning rate, ``lr``, and each push carries it: the server steps at it. So a rate set
    by hand and a scheduler on the worker work as for any torch optimizer, and act on this worker's pushes; a round is
    stepped at the mean of its workers' rates. A ``scheduler`` that is named here is the server's, one for all workers;
    if a worker's rate differs from the agreed one, the scheduled rate is multiplied by the ratio of both. The other
    options of a group stay as they were agreed, and changing one is an error.

    Args:
        params: parameters or param groups; a group's own options (``{"params": …, "weight_decay": 0.0}``) go to the
            server's optimizer. Keys that it does not have stay here, with a warning.
        optimizer: a class of ``torch.optim``, or its name: ``torch.optim.AdamW``, ``"AdamW"``, …
        options: its options by name; numbers, words and lists of them.
        scheduler: a class of ``torch.optim.lr_scheduler``, or its name, with its options, ``("StepLR", {"step_size":
            100})``; ``SequentialLR`` and ``ChainedScheduler`` have a third entry, the list of the schedulers inside.
        scheduler_every: versions of the model between two steps of the scheduler, or ``("samples", N)``: samples of all
            workers. An epoch is ``("samples", len(dataset))``, however many workers share it.
        lazy: step only the entries of a sparse push, parameters and state alike.
        density: ``ρ``; a number, or a function of the step.
        **connection: ``rounds=psclient.Rounds()`` for one step a round; see
            :class:`~psclient.optim.base.ParameterServerOptimizer`.

    Raises:
        ConfigurationError: an option cannot be sent; in ``step()``, one other than the rate was changed in a group.
        RefusedError: the server does not know the optimizer, or torch does not take the options.
    """

    _method = METHOD

    def __init__(
        self,
        params: Params,
        optimizer: Kind,
        options: Mapping[str, Any] | None = None,
        *,
        scheduler: tuple[Any, ...] | str | type[LRScheduler] | None = None,
        scheduler_every: int | tuple[str, int] = 1,
        lazy: bool = False,
        density: Density | None = None,
        **connection: Unpack[Options],
    ) -> None:
        name = optimizer_name(optimizer, "optimizer")
        if options is not None and not isinstance(options, Mapping):
            raise ConfigurationError(f"options= must be the optimizer's options by name, not {options!r}")
        self._known, default_rate = options_of(name)
        if misplaced := sorted(self._known & connection.keys()):
            raise ConfigurationError(
                f"{', '.join(misplaced)} of the server's optimizer stands in options=, as {{{misplaced[0]!r}: …}}"
            )
        agreed = {
            "update": "torch",
            "optimizer": as_json({"name": name, "options": dict(options or {})}, "options"),
            "scheduler": "" if scheduler is None else as_json(scheduler_description(scheduler), "scheduler"),
            "scheduler_every": scheduler_interval(scheduler_every),
            "lazy": "true" if lazy else "false",
        }
        super().__init__(params, {"lr": (options or {}).get("lr", default_rate)}, density, agreed, **connection)

    def _agreed_settings(self) -> dict[str, str]:
        """Workers must agree on everything about the server's optimizer."""
        unknown = {name for group in self.param_groups for name in group.keys() - _WORKERS_OWN - self._known}
        if unknown:
            log.warning(
                "the server's optimizer has no %s: these keys of param groups stay on the worker",
                ", ".join(sorted(unknown)),
            )
        groups = []
        for group, own in zip(self.param_groups, _options(self.param_groups, self._known), strict=True):
            rate = {} if group["lr"] == self.defaults["lr"] else {"lr": group["lr"]}
            groups.append({"tensors": self._model.positions_of(group), "options": own | rate})
        return super()._agreed_settings() | {"groups": as_json(groups, "param groups")}

    def _sources(self, model: TrainedModel, groups: ParamGroups) -> tuple[GradientSource, Callable[[], Rates]]:
        """Each group has a rate of its own, and nothing else may be changed in a group."""
        gradients, _ = super()._sources(model, groups)
        return gradients, partial(_rates, groups, self._known, _options(groups.all, self._known))

    def _from_torch(self, state: dict[str, Any]) -> NoReturn:
        raise ConfigurationError(
            "this state is of an optimizer of torch's, and a worker cannot give its moments to the server: load the "
            "model's weights alone, and moments begin anew; or begin the server with --init of a run that has them; or "
            "go on with psclient.Outer(inner_optimizer, …), whose inner optimizer takes this state"
        )


def _options(groups: Sequence[Mapping[str, Any]], known: frozenset[str]) -> list[dict[str, Any]]:
    """Return each group's own options for the server's optimizer, without the rate."""
    sent = known - _WORKERS_OWN - {"lr"}
    return [{name: value for name, value in group.items() if name in sent} for group in groups]


def _rates(groups: ParamGroups, known: frozenset[str], agreed: Sequence[Mapping[str, Any]]) -> Rates:
    for number, (now, then) in enumerate(zip(_options(groups.all, known), agreed, strict=True)):
        if now != then:
            changed = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
            raise ConfigurationError(
                f"{', '.join(changed)} of param group {number} is not what the server's optimizer was made with, and "
                "only lr can be changed in a run: set it back, or begin another run with it"
            )
    return group_rates(groups)


def group_rates(groups: ParamGroups) -> Rates:
    """Return the rates of a push of gradients: the server steps each group at its own."""
    rates = []
    for number in range(len(groups.all)):
        rates.append(groups.values(number)["lr"])
        if not rates[-1] <= LARGEST_RATE:
            raise HyperparameterError("lr", rates[-1], f"from 0 to {LARGEST_RATE:g}", number)
    return Rates(1.0, tuple(rates))
