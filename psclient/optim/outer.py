"""Outer: local steps with any torch optimizer, then one push of the difference (DiLoCo and SparseLoCo family)."""

import json
import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from psclient.compress.groups import ParamGroups, Rates
from psclient.compress.hyperparameters import needs_closure
from psclient.compress.method import Group, Sparse, State, Step, Whole, memory
from psclient.engine.checks import RetryGuard, finite, gather
from psclient.engine.step import GradientSource
from psclient.errors import ConfigurationError, NonFiniteGradientError, ServerUnreachableError, SparsepsError
from psclient.model.module import TrainedModel
from psclient.optim.base import Density, ParameterServerOptimizer
from pscore.select.kernels.base import GradientUpdate

log = logging.getLogger("psclient")


class _Deltas(dict[int, torch.Tensor]):
    """What the local steps have done, by position, while it is being pushed; empty else."""

    def among(self, positions: range) -> dict[int, torch.Tensor]:
        """Return those of some positions."""
        return {position: self[position] for position in positions if position in self}


class Outer(ParameterServerOptimizer):
    """Outer: ``H`` steps on this machine, then the difference goes to the server, whose own optimizer takes a step.

    DiLoCo (Douillard et al., 2023; arXiv 2311.08105), and with a density below 1 SparseLoCo (arXiv 2508.15706). Per
    tensor, every ``H`` steps::

        Δ = θ_start − θ_local                       # what the inner optimizer has done, as a descent direction
        e = β·e + Δ
        send s = Q(p) of p = top ρ of |e|;  e[sent] = 0
        server: one step of SGD(lr, momentum, nesterov) with s (per round: the mean of s) as its gradient
        θ_start = θ_local = what the server answers

    Asynchronous unless ``rounds`` is given: then the ways of several workers are added up, where a round takes their
    mean. The defaults are for that; DiLoCo has ``momentum=0.9, rounds=psclient.Rounds()``.

    In a training loop it stands where the inner optimizer stood. The param groups are the inner optimizer's, so a rate
    set there is the inner one, and a scheduler may be built on either::

        inner = torch.optim.AdamW(model.parameters(), lr=3e-4)
        optimizer = psclient.Outer(inner, period=50, model=model, server="host:50051", rounds=psclient.Rounds())

    Args:
        inner: takes the local steps; everything that it trains is trained.
        period: ``H``, local steps from one push to the next.
        lr: learning rate of the server's step.
        momentum: of the server's step. More than 0 is for rounds.
        nesterov: whether that momentum is Nesterov's; without momentum it means nothing.
        density: ``ρ``; a number, or a function of the number of the push.
        decay: ``β``, what is left of the error of the last push; 1 loses nothing.
        **connection: see :class:`~psclient.optim.base.ParameterServerOptimizer`; ``overlap`` is not to be had.

    Raises:
        ConfigurationError: a value is out of its range, or the inner optimizer cannot step without a closure.
    """

    name: ClassVar[str] = "outer"

    def __init__(
        self,
        inner: Optimizer,
        period: int,
        lr: float = 0.7,
        momentum: float = 0.0,
        nesterov: bool = True,
        density: Density = 1.0,
        decay: float = 1.0,
        **connection: Any,
    ) -> None:
        """Join the server; see the class."""
        if not isinstance(inner, Optimizer):
            raise ConfigurationError(
                "Outer takes an optimizer, not parameters: "
                "psclient.Outer(torch.optim.AdamW(model.parameters(), lr=3e-4), period=50, ...)"
            )
        if needs_closure(type(inner)):
            raise ConfigurationError(
                f"{type(inner).__name__} recomputes the loss within a step, and Outer calls inner.step() without a "
                "closure; take an inner optimizer that steps on gradients, as torch.optim.AdamW"
            )
        if not isinstance(period, int) or period < 1:
            raise ConfigurationError(f"period must be a number of local steps, at least 1, not {period!r}")
        if not 0 <= decay <= 1:
            raise ConfigurationError(f"decay must be from 0 to 1, not {decay!r}")
        if connection.get("overlap"):
            raise ConfigurationError("overlap=True pushes gradients, and local steps push none; leave it out")
        if momentum and connection.get("rounds") is None:
            log.warning(
                "momentum=%g without rounds: the server adds the local steps of all workers up, and momentum on top of "
                "that learns nothing with several; pass rounds=psclient.Rounds(), or leave momentum out",
                momentum,
            )
        self.inner, self.period, self._lr = inner, period, lr
        self.server_remembers = momentum > 0
        self._local_steps = 0
        self._trained_samples = 0  # in the local steps since the last push
        self._deltas = _Deltas()
        self._interrupted = RetryGuard()
        self._warned = False
        options = {"lr": lr, "momentum": momentum, "nesterov": nesterov and momentum > 0}
        self._agreed = {"update": "torch", "optimizer": json.dumps({"name": "SGD", "options": options})}
        params = [{"params": list(group["params"])} for group in inner.param_groups]
        super().__init__(params, {"decay": decay}, density, **connection)
        self.param_groups = inner.param_groups
        inner.register_load_state_dict_post_hook(partial(_follow, weakref.ref(self)))
        self._start = [parameter.detach().clone() for parameter in self._model.parameters]

    def agreed_settings(self) -> dict[str, str]:
        """Workers must agree on the server's step, the period and the decay."""
        positions = {id(parameter): position for position, parameter in enumerate(self._model.parameters)}
        given = [each for group in self.param_groups for each in group["params"]]
        trained = sorted(positions[id(each)] for each in given if id(each) in positions)
        groups = json.dumps([{"tensors": trained, "options": {}}])
        period, decay = str(self.period), str(float(self.defaults["decay"]))
        return super().agreed_settings() | self._agreed | {"groups": groups, "period": period, "decay": decay}

    def gradient_source(self, model: TrainedModel, groups: ParamGroups) -> GradientSource:
        """Return what collects the differences."""
        return self._deltas.among

    def rate_source(self, groups: ParamGroups) -> Callable[[], Rates]:
        """Return what says that differences are pushed, which carry no rate."""
        return partial(Rates, 1.0)

    @property
    def lr(self) -> float:
        """Learning rate of the server's step, agreed by all workers; those of ``param_groups`` are the inner ones."""
        return self._lr

    @property
    def unfinished(self) -> bool:
        """True where the push of a period has met an error, and its last local step is done."""
        return self._interrupted.matches(self._gradients())

    @property
    def local_steps(self) -> int:
        """Steps of the inner optimizer since the last push."""
        return self._local_steps

    def step(self, closure: Callable[[], Any] | None = None, *, samples: int | None = None) -> Any:
        """Take a local step, and every ``period`` of them push and take the server's answer over.

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
        if self._interrupted.matches(gradients):
            return
        self._interrupted.note(gradients)
        try:
            self.inner.step()
        except BaseException:
            self._interrupted.clear()
            raise
        finally:
            self._cluster.replica.accept()
        self._local_steps += 1
        self._trained_samples = max(1, self._stepper.samples_waiting)
        if self._local_steps >= self.period:
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

    def _hand_in(self) -> None:
        """Push what the local steps have done so far, as the end of a period does, and take the answer over.

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
            self._cluster.replica.accept()

    def state_dict(self) -> dict[str, Any]:
        """Return the outer state as any method's, and the inner optimizer's under ``inner``.

        Local steps since the last push are not in it: a worker that resumes begins at the server's model.
        """
        return super().state_dict() | {"inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take both optimizers' states over."""
        outer = {name: value for name, value in state_dict.items() if name != "inner"}
        if "inner" not in state_dict:
            raise ConfigurationError(
                "this state is another optimizer's: it has no inner; a state of the inner optimizer is for "
                "optimizer.inner.load_state_dict()"
            )
        super().load_state_dict(outer)
        self.inner.load_state_dict(state_dict["inner"])  # and with it the groups

    def _assign_groups(self) -> None:
        """Leave the outer step's groups as they are: those that a loop sees are the inner optimizer's."""

    def _check_added(self, group: Group) -> None:
        super()._check_added(group)
        if self._joined:
            raise ConfigurationError("the server's step has the tensors that the inner optimizer had at the beginning")

    @staticmethod
    def accumulate(state: State, group: Group, step: Step) -> Sparse | Whole:
        """``e = β·e + Δ``; at ρ = 1 all of it is sent."""
        if group["density"] < 1:
            e = memory(state, "residual", step.gradient)
            if group["decay"] != 1:
                e.mul_(group["decay"])
            return Sparse(e, GradientUpdate(step.gradient, 1.0))
        d = step.gradient.float()
        return Whole(state.pop("residual").mul_(group["decay"]).add_(d) if "residual" in state else d.clone())

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
        self._cluster.replica.accept()
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


def _follow(outer: "weakref.ref[Outer]", inner: Optimizer) -> None:
    """Let an outer optimizer have the groups that its inner one has loaded."""
    found = outer()
    if found is not None:
        found.param_groups = inner.param_groups
