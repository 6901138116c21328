"""ServerOptimizer: workers push gradients, and a ``torch.optim`` optimizer on the server takes the steps."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

from torch.optim.optimizer import ParamsT

from psclient.errors import ConfigurationError
from psclient.methods.base import Group, Sparse, State, Step, Whole, memory
from psclient.optimizer import Density, ParameterServerOptimizer
from pscore.kernels.base import Feed

_WORKERS_OWN = frozenset({"params", "param_names", "density"})


class ServerOptimizer(ParameterServerOptimizer):
    """A ``torch.optim`` optimizer that runs on the server, on sparse or dense gradients, as they come or per round.

    Per tensor, on every worker::

        r += g
        send s = Q(p) of p = top ρ of |r|;  r[sent] = 0
        server: one step of the named optimizer with s (per round: the mean of s) as its gradient

    The optimizer's state lives on the server only, once for all workers, and is part of its snapshots. Absent entries
    of a sparse push are gradients of zero, so a step changes everything and replies are best cut to their largest
    differences, which the server's ``--down-mode auto`` does by itself then; ``lazy`` touches only what was sent.

    The learning rate is the server's: give it, and a scheduler by name, here. A scheduler on the worker would drive
    nothing, and there is no ``lr`` in the param groups for one to find.

    Args:
        params: parameters or param groups; a group's own options (``{"params": …, "weight_decay": 0.0}``) go to the
            server's optimizer.
        optimizer: name of a class in ``torch.optim``: ``"SGD"``, ``"RMSprop"``, ``"AdamW"``, …
        options: its options by name; numbers, words and lists of them.
        scheduler: a class in ``torch.optim.lr_scheduler`` by name with its options, ``("StepLR", {"step_size": 100})``;
            for ``SequentialLR`` and ``ChainedScheduler`` with a third entry, the list of the schedulers inside.
        scheduler_every: versions of the model between two steps of the scheduler.
        lazy: step only the entries of a sparse push, parameters and state alike.
        density: ``ρ``; a number, or a function of the step.
        **connection: ``rounds=psclient.Rounds()`` for one step a round; see
            :class:`~psclient.optimizer.ParameterServerOptimizer`.

    Raises:
        ConfigurationError: an option cannot be sent.
        RefusedError: the server does not know the optimizer, or torch does not take the options.
    """

    name: ClassVar[str] = "server_optimizer"
    sends_rate_times_gradient: ClassVar[bool] = False

    def __init__(
        self,
        params: ParamsT,
        optimizer: str,
        options: Mapping[str, Any] | None = None,
        *,
        scheduler: tuple[Any, ...] | str | None = None,
        scheduler_every: int = 1,
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
        if not isinstance(scheduler_every, int):
            raise ConfigurationError(f"scheduler_every= must be a number of versions, not {scheduler_every!r}")
        self._agreed = {
            "update": "torch",
            "optimizer": _json({"name": optimizer, "options": dict(options or {})}, "options"),
            "scheduler": _json(_scheduler(scheduler), "scheduler") if scheduler is not None else "",
            "scheduler_every": str(scheduler_every),
            "lazy": "true" if lazy else "false",
        }
        super().__init__(params, {}, density, **connection)

    def agreed_settings(self) -> dict[str, str]:
        """Workers must agree on everything about the server's optimizer."""
        positions = {id(parameter): position for position, parameter in enumerate(self._model.parameters)}
        groups = []
        for group in self.param_groups:
            own = {name: value for name, value in group.items() if name not in _WORKERS_OWN}
            served = sorted(positions[id(each)] for each in group["params"] if id(each) in positions)
            groups.append({"tensors": served, "options": own})
        return super().agreed_settings() | self._agreed | {"groups": _json(groups, "param groups")}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See the base; a group has no rate."""
        super().add_param_group(_Group(param_group))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a loaded state over, as torch does."""
        super().__setstate__({**state, "param_groups": [_Group(group) for group in state["param_groups"]]})

    def _check_added(self, group: Group) -> None:
        super()._check_added(group)
        if self._joined:
            raise ConfigurationError(
                "the server's optimizer has the param groups that it was made with, and would leave others alone; "
                "a run that trains them too is another one"
            )

    @staticmethod
    def accumulate(state: State, group: Group, step: Step) -> Sparse | Whole:
        """``r += g``; at ρ = 1 all of ``r`` is sent."""
        if group["density"] < 1:
            return Sparse(memory(state, "residual", step.gradient), Feed(step.gradient, 1.0))
        g = step.gradient.float()
        return Whole(state.pop("residual").add_(g) if "residual" in state else g.clone())


class _Group(dict[str, Any]):
    """A param group without a rate, which says so to a scheduler that looks for one."""

    def __missing__(self, name: str) -> NoReturn:
        if name == "lr":
            raise ConfigurationError(
                "the learning rate is the server's, and a scheduler on the worker would drive nothing: name it to "
                'ServerOptimizer, as scheduler=("StepLR", {"step_size": 100})'
            )
        raise KeyError(name)


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
