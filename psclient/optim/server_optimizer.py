"""ServerOptimizer: workers push gradients, and a ``torch.optim`` optimizer on the server takes the steps."""

import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
from torch.optim.optimizer import ParamsT

from psclient.compress.groups import ParamGroups, Rates
from psclient.compress.hyperparameters import check_hyperparameters, needs_closure
from psclient.compress.method import Group, Sparse, State, Step, Whole, memory
from psclient.errors import ConfigurationError
from psclient.optim.base import Density, ParameterServerOptimizer
from pscore.select.kernels.base import GradientUpdate
from pscore.wire.messages import LARGEST_RATE

log = logging.getLogger("psclient")

_WORKERS_OWN = frozenset(
    {"params", "param_names", "name", "density", "lr_scale", "initial_lr", "max_lr", "min_lr"}
    | {"swa_lr", "fused", "foreach", "capturable", "differentiable"}
)
"""What a param group may have that is of no use to the server: names, what schedulers keep, how torch computes."""

_COUNTED = {"versions": "", "samples": " samples"}


class ServerOptimizer(ParameterServerOptimizer):
    """A ``torch.optim`` optimizer that runs on the server, on sparse or dense gradients, as they come or per round.

    Per tensor, on every worker::

        r += g
        send s = Q(p) of p = top ρ of |r|;  r[sent] = 0
        server: one step of the named optimizer with s (per round: the mean of s) as its gradient

    The optimizer's state lives on the server only, once for all workers, and is part of its snapshots. Absent entries
    of a sparse push are gradients of zero, so a step changes everything and replies are best cut to their largest
    differences, which the server's ``--down-mode auto`` does by itself then; ``lazy`` touches only what was sent.

    The param groups have the learning rate, ``lr``, and each push takes it along: the server steps at it. So a rate set
    by hand and a scheduler on the worker work as for any torch optimizer, and act on this worker's pushes; a round is
    stepped at the mean of its workers' rates. A ``scheduler`` that is named here is the server's, one for all workers;
    where a worker's rate differs from the agreed one, the scheduled rate is multiplied by the ratio of both. The other
    options of a group stay as they were agreed, and changing one is an error.

    Args:
        params: parameters or param groups; a group's own options (``{"params": …, "weight_decay": 0.0}``) go to the
            server's optimizer. Keys that it does not have stay here, with a warning.
        optimizer: name of a class in ``torch.optim``: ``"SGD"``, ``"RMSprop"``, ``"AdamW"``, …
        options: its options by name; numbers, words and lists of them.
        scheduler: a class in ``torch.optim.lr_scheduler`` by name with its options, ``("StepLR", {"step_size": 100})``;
            for ``SequentialLR`` and ``ChainedScheduler`` with a third entry, the list of the schedulers inside.
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

    name: ClassVar[str] = "server_optimizer"
    server_remembers = True

    def __init__(
        self,
        params: ParamsT,
        optimizer: str,
        options: Mapping[str, Any] | None = None,
        *,
        scheduler: tuple[Any, ...] | str | None = None,
        scheduler_every: int | tuple[str, int] = 1,
        lazy: bool = False,
        density: Density = 1.0,
        **connection: Any,
    ) -> None:
        """Join the server; see the class."""
        for what, named in (("optimizer", optimizer), ("scheduler", scheduler)):
            if isinstance(named, type):
                raise ConfigurationError(f"the server's {what} is given by name, {named.__name__!r}, not as a class")
        if not isinstance(optimizer, str):
            raise ConfigurationError(f"the server's optimizer is given by name, as 'AdamW', not as {optimizer!r}")
        if options is not None and not isinstance(options, Mapping):
            raise ConfigurationError(f"options= must be the optimizer's options by name, not {options!r}")
        self._agreed = {
            "update": "torch",
            "optimizer": _json({"name": optimizer, "options": dict(options or {})}, "options"),
            "scheduler": _json(_scheduler(scheduler), "scheduler") if scheduler is not None else "",
            "scheduler_every": _every(scheduler_every),
            "lazy": "true" if lazy else "false",
        }
        self._known, default_rate = _signature(optimizer)
        if misplaced := sorted(self._known & connection.keys()):
            raise ConfigurationError(
                f"{', '.join(misplaced)} of the server's optimizer stands in options=, as {{{misplaced[0]!r}: …}}"
            )
        super().__init__(params, {"lr": (options or {}).get("lr", default_rate)}, density, **connection)

    def agreed_settings(self) -> dict[str, str]:
        """Workers must agree on everything about the server's optimizer."""
        positions = {id(parameter): position for position, parameter in enumerate(self._model.parameters)}
        unknown = {name for group in self.param_groups for name in group.keys() - _WORKERS_OWN - self._known}
        if unknown:
            log.warning(
                "the server's optimizer has no %s: these keys of param groups stay on the worker",
                ", ".join(sorted(unknown)),
            )
        groups = []
        for group, own in zip(self.param_groups, _options(self.param_groups, self._known), strict=True):
            served = sorted(positions[id(each)] for each in group["params"] if id(each) in positions)
            rate = {} if group["lr"] == self.defaults["lr"] else {"lr": group["lr"]}
            groups.append({"tensors": served, "options": own | rate})
        return super().agreed_settings() | self._agreed | {"groups": _json(groups, "param groups")}

    def rate_source(self, groups: ParamGroups) -> Callable[[], Rates]:
        """Return what says the rate of each group, and that nothing else was changed there."""
        return partial(_rates, groups, self._known, _options(groups.all, self._known))

    def _check_added(self, group: Group) -> None:
        super()._check_added(group)
        if self._joined:
            raise ConfigurationError(
                "the server's optimizer has the param groups that it was made with, and would leave others alone; "
                "a run that trains them too is another one"
            )

    def _from_torch(self, state: dict[str, Any]) -> NoReturn:
        raise ConfigurationError(
            "this state is of an optimizer of torch's, and a worker cannot give its moments to the server: load the "
            "model's weights alone, and moments begin anew; or begin the server with --init of a run that has them; or "
            "go on with psclient.Outer(inner, …), whose inner optimizer takes this state"
        )

    @staticmethod
    def accumulate(state: State, group: Group, step: Step) -> Sparse | Whole:
        """``r += g``; at ρ = 1 all of ``r`` is sent."""
        if group["density"] < 1:
            return Sparse(memory(state, "residual", step.gradient), GradientUpdate(step.gradient, 1.0))
        g = step.gradient.float()
        return Whole(state.pop("residual").add_(g) if "residual" in state else g.clone())


def _signature(optimizer: str) -> tuple[frozenset[str], float]:
    """Return the options that a class of ``torch.optim`` has, and its default rate; the server knows which it takes."""
    kind = getattr(torch.optim, optimizer, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        return frozenset(), 0.0
    if needs_closure(kind):
        raise ConfigurationError(
            f"{optimizer} recomputes the loss within a step, and a server has no loss to compute; take an optimizer "
            "that steps on gradients, as AdamW"
        )
    options = inspect.signature(kind).parameters
    return frozenset(options.keys() - {"params"}), float(options["lr"].default) if "lr" in options else 0.0


def _options(groups: Sequence[Mapping[str, Any]], known: frozenset[str]) -> list[dict[str, Any]]:
    """Return what each group has of its own for the server's optimizer, but for the rate."""
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
    for number, group in enumerate(groups.all):
        check_hyperparameters({"lr": group["lr"]})
        if not float(group["lr"]) <= LARGEST_RATE:
            raise ConfigurationError(
                f"lr of param group {number} is {float(group['lr']):g}; it must be 0 to {LARGEST_RATE:g}"
            )
    return Rates(1.0, tuple(float(group["lr"]) for group in groups.all))


def _every(said: int | tuple[str, int]) -> str:
    unit, count = said if isinstance(said, tuple | list) and len(said) == 2 else ("versions", said)
    if (
        not isinstance(unit, str)
        or unit not in _COUNTED
        or isinstance(count, bool)
        or not isinstance(count, int)
        or count < 1
    ):
        raise ConfigurationError(
            'scheduler_every= must be a number of versions or ("samples", N), at least 1; an epoch is '
            f'("samples", len(dataset)); it is {said!r}'
        )
    return f"{count}{_COUNTED[unit]}"


def _scheduler(said: tuple[Any, ...] | str) -> dict[str, Any]:
    words = (said,) if isinstance(said, str) else said
    name, options, inner = (*words, {}, ())[:3] if isinstance(words, tuple | list) and words else ("", {}, ())
    if not isinstance(name, str) or not name or not isinstance(options, Mapping):
        raise ConfigurationError(
            f'scheduler= must be a name, or a name with options, as ("StepLR", {{"step_size": 100}}), not {said!r}'
        )
    found: dict[str, Any] = {"name": name, "options": dict(options)}
    return found | ({"schedulers": [_scheduler(each) for each in inner]} if inner else {})


def _json(value: Any, what: str) -> str:
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"the {what} of the server's optimizer must be numbers, words and lists of them: {error}"
        ) from error
