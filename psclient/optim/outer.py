"""Outer: local steps with any torch optimizer, then one push of the difference (DiLoCo and SparseLoCo family)."""

import logging
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from psclient.compress.groups import ParamGroups, Rates
from psclient.compress.hyperparameters import needs_closure
from psclient.compress.method import Group, Sparse, State, Step, Whole, memory
from psclient.engine.checks import Interrupted, finite, gather
from psclient.engine.step import GradientSource
from psclient.errors import ConfigurationError, NonFiniteGradientError, ServerUnreachableError, SparsepsError
from psclient.model.module import TrainedModel
from psclient.optim.arguments import Density, Description, as_json, options_of
from psclient.optim.base import ParameterServerOptimizer
from psclient.optim.recurrences import whole
from pscore.select.kernels.base import GradientUpdate

log = logging.getLogger("psclient")

DEFAULT_OUTER: Description = ("SGD", {"lr": 0.7})
PLAIN_AVERAGING: Description = ("SGD", {"lr": 1.0})


class Outer(ParameterServerOptimizer):
    """Outer: ``H`` steps on this machine, then the difference goes to the server, whose own optimizer takes a step.

    DiLoCo (Douillard et al., 2023; arXiv 2311.08105), and with a density below 1 SparseLoCo (arXiv 2508.15706). Per
    tensor, every ``H`` steps::

        Δ = θ_start − θ_local                       # what the inner optimizer has done, as a descent direction
        e = β·e + Δ
        send s = Q(p) of p = top ρ of |e|;  e[sent] = 0
        server: one step of the outer optimizer with s (per round: the mean of s) as its gradient
        θ_start = θ_local = what the server answers

    Asynchronous unless ``rounds`` is given: then the ways of several workers are added up, where a round takes their
    mean. The default is for that; DiLoCo has ``("SGD", {"lr": 0.7, "momentum": 0.9, "nesterov": True})`` with
    ``rounds=psclient.Rounds()``.

    In a training loop it stands where the inner optimizer stood. The param groups are the inner optimizer's, so a rate
    set there is the inner one, and a scheduler may be built on either::

        inner = torch.optim.AdamW(model.parameters(), lr=3e-4)
        optimizer = psclient.Outer(inner, sync_every=50, model=model, server="host:50051", rounds=psclient.Rounds())

    Args:
        inner_optimizer: takes the local steps; everything that it trains is trained.
        outer_optimizer: the server's: a class of ``torch.optim`` by name, or by name and options, as ``("SGD",
            {"lr": 0.7})``; ``None`` for plain averaging. Momentum is for rounds.
        sync_every: ``H``, local steps from one push to the next.
        density: ``ρ``; a number, or a function of the number of the push.
        decay: ``β``, what is left of the error of the last push; 1 loses nothing.
        **connection: see :class:`~psclient.optim.base.ParameterServerOptimizer`; ``overlap`` is not to be had.

    Raises:
        ConfigurationError: a value is out of its range, or the inner optimizer cannot step without a closure.
        RefusedError: the server does not know the outer optimizer, or torch does not take the options.
    """

    name: ClassVar[str] = "outer"

    def __init__(
        self,
        inner_optimizer: Optimizer,
        outer_optimizer: Description | None = DEFAULT_OUTER,
        *,
        sync_every: int,
        density: Density = 1.0,
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
        name, options = _described(outer_optimizer)
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
        self.inner_optimizer, self.sync_every = inner_optimizer, sync_every
        self._lr = float(options.get("lr", options_of(name)[1]))
        self.server_remembers = name != "SGD" or bool(options.get("momentum"))
        self._local_steps = 0
        self._trained_samples = 0  # in the local steps since the last push
        self._deltas: dict[int, torch.Tensor] = {}
        """The differences under way to the server, by position; empty between two pushes."""
        self._interrupted = Interrupted()
        self._warned = False
        agreed = {
            "update": "torch",
            "optimizer": as_json({"name": name, "options": dict(options)}, "options"),
            "period": str(sync_every),
            "decay": str(float(decay)),
        }
        names = ("params", "param_names")
        params = [
            {each: list(group[each]) for each in names if each in group} for group in inner_optimizer.param_groups
        ]
        super().__init__(params, {"decay": decay}, density, agreed, **connection)
        self.param_groups = inner_optimizer.param_groups
        inner_optimizer.register_load_state_dict_post_hook(partial(_follow, weakref.ref(self)))
        self._start = [parameter.detach().clone() for parameter in self._model.parameters]

    def agreed_settings(self) -> dict[str, str]:
        """The server steps all tensors alike."""
        trained = sorted(position for group in self.param_groups for position in self.positions_of(group))
        return super().agreed_settings() | {"groups": as_json([{"tensors": trained, "options": {}}], "param groups")}

    def gradient_source(self, model: TrainedModel, groups: ParamGroups) -> GradientSource:
        """Return what collects the differences."""
        return partial(_among, self._deltas)

    def rate_source(self, groups: ParamGroups) -> Callable[[], Rates]:
        """Differences carry no rate."""
        return partial(Rates, 1.0)

    @property
    def lr(self) -> float:
        """Learning rate of the server's step, agreed by all workers; those of ``param_groups`` are the inner ones."""
        return self._lr

    @property
    def unfinished(self) -> bool:
        """True where the push of a period has met an error, and its last local step is done."""
        return self._interrupted.holds(self._gradients())

    @property
    def local_steps(self) -> int:
        """Steps of the inner optimizer since the last push."""
        return self._local_steps

    def step(self, closure: Callable[[], Any] | None = None, *, samples: int | None = None) -> Any:
        """Take a local step, and every ``sync_every`` of them push and take the server's answer over.

        Args:
            closure: recomputes the loss; see :meth:`ParameterServerOptimizer.step`.
            samples: not to be given: samples are counted at the calls of ``model``.

        Returns:
            What the closure returned.

        Raises:
            NonFiniteGradientError: the local steps have led to a parameter that is not finite; they are undone.
            ServerUnreachableError: no server within the patience; call again to go on, nothing is lost.
            RunFinishedError: the run was over before this push.
        """
        if samples is not None:
            raise ConfigurationError("Outer counts samples at the calls of model=; leave samples out")
        return super().step(closure)

    def _completed(self) -> None:
        self._interrupted.clear()

    def _gradients(self) -> dict[int, torch.Tensor]:
        return gather(self._model, self._groups, range(len(self._model.parameters)))

    def _step(self, samples: int | None) -> None:
        gradients = self._gradients()
        self._settle()
        if self._interrupted.holds(gradients):
            return
        self._interrupted.note(gradients)
        try:
            self.inner_optimizer.step()
        except BaseException:
            self._interrupted.clear()
            raise
        finally:
            self._cluster.accept_model()
        self._local_steps += 1
        self._trained_samples = max(1, self._stepper.samples_waiting)
        if self._local_steps >= self.sync_every:
            self._deltas.update(self._ahead())
            self._push()

    def _flush(self) -> None:
        """Push what the local steps have done so far and everything that this worker still holds, at density 1."""
        self._settle()
        samples = self._trained_samples if self._local_steps else 0
        if self._local_steps:
            self._hold(self._ahead())
        self._stepper.flush(samples)
        self._trained_samples = 0

    def _flush_on_exit(self) -> None:
        """Push what the local steps have done so far, as after ``sync_every`` of them, and take the answer over.

        The error stays here. It may hold the same way several times over, since each period begins without what was
        not sent: all of it at once can lead beyond where any worker has been.
        """
        self._settle()
        if self._local_steps:
            self._deltas.update(self._ahead())
            self._push()

    def _hold(self, ahead: dict[int, torch.Tensor]) -> None:
        """Undo the local steps, and put them into the residuals."""
        try:
            finite(self._model, ahead)
        except NonFiniteGradientError:
            self._go_back()
            raise
        self._deltas.update(ahead)
        self._go_back()
        for position in list(self._deltas):
            parameter = self._model.parameters[position]
            residual = memory(self.state[parameter], "residual", parameter)
            residual.add_(self._deltas.pop(position).reshape(-1))

    def _pull(self) -> None:
        """Bring the parameters up to the server's; the local steps since the last push stay, on top of them."""
        self._settle(drops=True)
        ahead, steps = self._ahead(), self._local_steps
        self._go_back()
        try:
            super()._pull()
        finally:  # also where it failed: what has come of it by then is the server's, and no step of this worker
            self._begin_here()
            self._local_steps = steps
            for position, delta in ahead.items():
                parameter = self._model.parameters[position]
                parameter.sub_(delta.to(parameter.dtype))
            self._cluster.accept_model()

    def state_dict(self) -> dict[str, Any]:
        """Return the outer state as any method's, and the inner optimizer's under ``inner``.

        Local steps since the last push are not in it: a worker that resumes begins at the server's model.
        """
        return super().state_dict() | {"inner": self.inner_optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take both optimizers' states over."""
        outer = {name: value for name, value in state_dict.items() if name != "inner"}
        if "inner" not in state_dict:
            raise ConfigurationError(
                "this state is another optimizer's: it has no inner; a state of the inner optimizer is for "
                "optimizer.inner_optimizer.load_state_dict()"
            )
        super().load_state_dict(outer)
        self.inner_optimizer.load_state_dict(state_dict["inner"])  # and with it the groups

    def _assign_groups(self) -> None:
        """Leave the outer step's groups as they are: those that a loop sees are the inner optimizer's."""

    def _check_added(self, group: Group) -> None:
        super()._check_added(group)
        if self._joined:
            raise ConfigurationError("the server's step has the tensors that the inner optimizer had at the beginning")

    @staticmethod
    def accumulate(state: State, group: Group, step: Step) -> Sparse | Whole:
        """``e = β·e + Δ``; at ρ = 1 all of it is sent."""
        if group["decay"] != 1 and "residual" in state:
            state["residual"].mul_(group["decay"])
        if group["density"] < 1:
            return Sparse(memory(state, "residual", step.gradient), GradientUpdate(step.gradient, 1.0))
        return whole(state, step.gradient.float())

    # Inner parts

    def _settle(self, *, drops: bool = False) -> None:
        """Bring an earlier push to its end, and what was loaded to the server, or the server's model here."""
        if self._deltas:
            self._push()
        if self._stepper.settle_load(drops=drops):
            self._begin_here()
            self._local_steps = 0

    def _ahead(self) -> dict[int, torch.Tensor]:
        """Return the differences that the local steps have made, by position."""
        return {
            position: start.float() - parameter.float()
            for position, (parameter, start) in enumerate(zip(self._model.parameters, self._start, strict=True))
            if parameter in self._groups and parameter.numel()
        }

    def _go_back(self) -> None:
        """Undo the local steps, so that the parameters are what the server knows."""
        for parameter, start in zip(self._model.parameters, self._start, strict=True):
            if parameter in self._groups:
                parameter.copy_(start)
        self._cluster.accept_model()
        self._local_steps = 0

    def _push(self) -> None:
        """Push the differences, or bring a push of them to its end that a lost server has interrupted."""
        if self._local_steps:  # they are in the differences
            self._go_back()
        try:
            self._stepper.step(None, self.gradient_scale)
        except SparsepsError as error:
            if not isinstance(error, ServerUnreachableError):
                self._deltas.clear()
            if isinstance(error, NonFiniteGradientError):  # the local steps are undone
                self._interrupted.clear()
            raise
        self._stepper.completed()
        self._deltas.clear()
        self._begin_here()
        if self._rounds is None and self.live_workers > 1 and not self._warned:
            self._warned = True
            log.warning(
                "%d workers push local steps without rounds: the server adds all of them up. If the loss is unsteady, "
                "pass rounds=psclient.Rounds(), or a lower lr (of Outer) and no momentum",
                self.live_workers,
            )

    def _begin_here(self) -> None:
        for parameter, start in zip(self._model.parameters, self._start, strict=True):
            start.copy_(parameter)


def _described(outer_optimizer: object) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the options of an outer optimizer."""
    given: Any = PLAIN_AVERAGING if outer_optimizer is None else outer_optimizer
    parts = (given, {}) if isinstance(given, str) else given
    if not (
        isinstance(parts, tuple | list)
        and len(parts) == 2
        and isinstance(parts[0], str)
        and isinstance(parts[1], Mapping)
    ):
        raise ConfigurationError(
            'outer_optimizer= must be the server\'s optimizer by name and options, as ("SGD", {"lr": 0.7, "momentum": '
            f"0.9}}), or None for plain averaging, not {given!r}"
        )
    return parts[0], parts[1]


def _among(deltas: Mapping[int, torch.Tensor], positions: range) -> dict[int, torch.Tensor]:
    return {position: deltas[position] for position in positions if position in deltas}


def _follow(outer: "weakref.ref[Outer]", inner: Optimizer) -> None:
    """Let an outer optimizer have the groups that its inner one has loaded."""
    found = outer()
    if found is not None:
        found.param_groups = inner.param_groups
