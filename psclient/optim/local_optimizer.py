"""The optimizer that methods with local steps share: a ``torch.optim`` optimizer steps here, and differences travel."""

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Unpack

import torch
from torch.optim import Optimizer

from psclient.compress.groups import ParamGroups, Rates
from psclient.engine.engine import GradientSource
from psclient.engine.state import method_of, without_mark
from psclient.errors import ConfigurationError
from psclient.model.module import TrainedModel
from psclient.optim.arguments import Density, RoundsOptions, needs_closure
from psclient.optim.base import ParameterServerOptimizer
from psclient.optim.local_steps import Deltas, LocalSteps


class LocalOptimizer(ParameterServerOptimizer):
    """Base of the methods that wrap an optimizer: after ``sync_every`` of its steps the difference is pushed.

    ``defaults`` are of the param groups of pushes; ``averages``: the server averages the workers' differences or
    models, else it adds the differences up.
    """

    def __init__(
        self,
        inner_optimizer: Optimizer,
        sync_every: int,
        defaults: dict[str, Any],
        density: Density | None,
        agreed: Mapping[str, str],
        /,
        *,
        averages: bool,
        **connection: Unpack[RoundsOptions],
    ) -> None:
        name = type(self).__name__
        if not isinstance(inner_optimizer, Optimizer):
            raise ConfigurationError(
                f"{name} takes an optimizer, not parameters: "
                f"psclient.{name}(torch.optim.AdamW(model.parameters(), lr=3e-4), ...)"
            )
        if needs_closure(type(inner_optimizer)):
            raise ConfigurationError(
                f"{type(inner_optimizer).__name__} recomputes the loss within a step, and {name} calls its step() "
                "without a closure; take an inner optimizer that steps on gradients, as torch.optim.AdamW"
            )
        if connection.get("overlap"):
            raise ConfigurationError(
                f"overlap=True pushes gradients, and {name} pushes the difference that a local step has made; "
                "leave it out"
            )
        self.inner_optimizer = inner_optimizer
        self._deltas: Deltas = {}
        wanted = ("params", "param_names")
        params = [{key: group[key] for key in wanted if key in group} for group in inner_optimizer.param_groups]
        super().__init__(params, defaults, density, agreed, **connection)
        self._outer_groups, self.param_groups = self.param_groups, inner_optimizer.param_groups
        inner_optimizer.register_load_state_dict_post_hook(partial(_follow, weakref.ref(self)))
        self._steps = LocalSteps(
            inner_optimizer,
            sync_every,
            self._deltas,
            self._engine,
            self._model,
            self._groups,
            averages=averages,
        )

    def _sources(self, model: TrainedModel, groups: ParamGroups) -> tuple[GradientSource, Callable[[], Rates]]:
        """A push has the differences, which carry no rate."""
        return partial(_among, self._deltas), partial(Rates, 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of pushes as any method's, and with each parameter's the inner optimizer's, as ``inner``.

        Local steps since the last push are not in it: a worker that resumes begins at the server's model.
        """
        state = super().state_dict()
        for key, inner in self.inner_optimizer.state_dict()["state"].items():
            state["state"][key] = {**state["state"].get(key, {}), "inner": inner}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load both optimizers' states."""
        if method_of(state_dict) != self._method.name:
            raise ConfigurationError(
                "this state is another optimizer's; a state of the inner optimizer is for "
                "optimizer.inner_optimizer.load_state_dict()"
            )
        outer, inner = {}, {}
        for key, memories in state_dict["state"].items():
            outer[key] = {name: value for name, value in memories.items() if name != "inner"}
            if "inner" in memories:
                inner[key] = memories["inner"]
        super().load_state_dict({**state_dict, "state": outer})
        self._groups.assign(self._outer_groups)
        groups = without_mark(state_dict["param_groups"])
        self.inner_optimizer.load_state_dict({"state": inner, "param_groups": groups})  # and with it the groups

    def _open_states(self) -> None:
        """Leave the state empty: then ``torch.distributed.checkpoint`` asks for the inner one too, by a step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, samples: int | None = None) -> Any:
        """Take a local step, and push when it is due; see :meth:`ParameterServerOptimizer.step`."""
        self._engine.require_open()
        return None if self._makes_state_only() else super().step(closure, samples=samples)

    def _makes_state_only(self) -> bool:
        """Make a state, and return True, if that is all that a step is for.

        ``torch.distributed.checkpoint`` steps an optimizer without a state at a rate of 0 with gradients of zero.
        """
        rates = [group.get("lr", 0.0) for group in self.param_groups]
        gradients = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        if self.state or any(map(float, rates)) or any(gradient is None or gradient.any() for gradient in gradients):
            return False
        if not self.inner_optimizer.state:
            self.inner_optimizer.step()
            self._engine.always(self._engine.replica.accept)
        return True


def _among(deltas: Deltas, positions: range) -> dict[int, torch.Tensor]:
    return {position: deltas[position] for position in positions if position in deltas}


def _follow(outer: "weakref.ref[LocalOptimizer]", inner: Optimizer) -> None:
    """Set the groups of an outer optimizer to those that its inner one has loaded."""
    found = outer()
    if found is not None:
        found.param_groups = inner.param_groups
