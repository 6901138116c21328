"""Steps on this machine, and the push of their difference."""

import logging
from collections.abc import Iterator

import torch
from torch.optim import Optimizer

from psclient.compress.gradients import PushedGradients, finite, gather, require_trainable
from psclient.compress.groups import ParamGroups, check_inner
from psclient.engine.engine import Engine, GradientScale
from psclient.errors import ConfigurationError, NonFiniteGradientError, PatienceError, SparsepsError
from psclient.model.module import TrainedModel

log = logging.getLogger("psclient")

Deltas = dict[int, torch.Tensor]
"""Differences that local steps have made, by position in the layout, fp32."""


class LocalSteps:
    """Runs the steps of ``inner`` on this machine, and pushes after each ``sync_every``; in the worker's thread.

    ``engine`` pushes ``deltas``, which are filled here and empty between two pushes; ``averages``: the server averages
    the workers' differences or models, else it adds the differences up. ``local_steps`` counts those since the last
    push.
    """

    def __init__(
        self,
        inner: Optimizer,
        sync_every: int,
        deltas: Deltas,
        engine: Engine,
        model: TrainedModel,
        groups: ParamGroups,
        *,
        averages: bool,
    ) -> None:
        self.inner, self.local_steps = inner, 0
        self._sync_every, self._deltas, self._averages = sync_every, deltas, averages
        self._engine, self._model, self._groups = engine, model, groups
        self._trained_samples = 0  # in the local steps since the last push
        self.pushed = PushedGradients()  # and those of a local step, until its caller knows of its end
        self._warned = False
        self._known = frozenset(map(id, _parameters_of(inner)))
        trained = {n: parameter for n, parameter in enumerate(model.parameters) if parameter in groups}
        self._start = {position: parameter.detach().clone() for position, parameter in trained.items()}

    @property
    def unfinished(self) -> bool:
        """Whether the push after ``sync_every`` steps has met an error, and the last local step is done."""
        return self.pushed.matches(self._gradients())

    def step(self, samples: int | None, scale: GradientScale | None) -> None:
        """Take a local step, and after ``sync_every`` of them push."""
        if samples is not None:
            raise ConfigurationError("local steps count samples at the calls of model=; leave samples out")
        self._require_known()
        gradients = self._gradients()
        self._settle()
        if not gradients:
            require_trainable(self._model, self._groups)
        if self.pushed.matches(gradients):
            return
        check_inner(self.inner.param_groups)
        self.pushed.note(gradients)
        try:
            self.inner.step()
        except BaseException:
            self.pushed.clear()
            raise
        finally:
            self._engine.replica.accept()
        self.local_steps += 1
        self._trained_samples = max(1, self._engine.samples_waiting)
        if self.local_steps >= self._sync_every:
            self._push(self._differences())

    def flush(self) -> None:
        """Push the local steps so far and all residuals, at density 1."""
        self._settle()
        samples = 0
        if self.local_steps:
            samples = self._trained_samples
            self._move_to_residuals()
        self._engine.flush(samples)

    def flush_on_exit(self) -> None:
        """Push the local steps so far as after ``sync_every`` of them, and apply the answer.

        The residual is not flushed: it may contain the same direction several times over, because each period started
        without the unsent part.
        """
        self._settle()
        if self.local_steps:
            self._push(self._differences())

    def wait_for_all(self, seconds: float) -> None:
        """Push the local steps so far, and wait until all live workers are through."""
        self.flush_on_exit()
        self._engine.wait_for_all(seconds)

    def pull(self) -> None:
        """Bring the parameters up to the server's; the local steps since the last push stay, on top of them."""
        self._settle(drops=True)
        differences, steps = self._differences(), self.local_steps
        self._undo()
        try:
            self._engine.pull()
        finally:  # also after an error: parameters that have arrived by then are the server's, no step of this worker
            self._begin_here()
            self.local_steps = steps
            for position, delta in differences.items():
                parameter = self._model.parameters[position]
                parameter.sub_(delta.to(parameter.dtype))
            self._engine.replica.accept()

    def _require_known(self) -> None:
        """Raise :class:`ConfigurationError` if the inner optimizer has a parameter that it had not at first.

        It would be trained here, and never travel.
        """
        unknown = next((each for each in _parameters_of(self.inner) if id(each) not in self._known), None)
        if unknown is None:
            return
        known = zip(self._model.layout.parameters, self._model.parameters, strict=True)
        name = next((repr(spec.name) for spec, parameter in known if parameter is unknown), "a parameter")
        raise ConfigurationError(
            f"{name} was given to the inner optimizer after the outer one was made, and would be trained on this "
            "machine only; give the inner optimizer all its groups before, or close() this one and make a new one"
        )

    def _gradients(self) -> dict[int, torch.Tensor]:
        return gather(self._model, self._groups, range(len(self._model.parameters)))

    def _settle(self, *, drops: bool = False) -> None:
        """End an earlier push, and agree with the server on one model if the script has loaded another."""
        if self._deltas:
            self._push({})
        if self._engine.settle_load(drops=drops):
            self._begin_here()

    def _begin_here(self) -> None:
        """Count local steps from these parameters; what is written to them from now on travels with the difference."""
        self._engine.replica.accept()
        for position, start in self._start.items():
            start.copy_(self._model.parameters[position])
        self.local_steps = 0

    def _differences(self) -> Deltas:
        """Return the way of the local steps so far, as a descent direction."""
        parameters = self._model.parameters
        return {n: start.float() - parameters[n].float() for n, start in self._start.items() if start.numel()}

    def _undo(self) -> None:
        """Undo the local steps, so that the parameters are what the server knows."""
        for position, start in self._start.items():
            self._model.parameters[position].copy_(start)
        self._engine.replica.accept()
        self.local_steps = 0

    def _move_to_residuals(self) -> None:
        """Undo the local steps, and add their differences to the residuals."""
        differences = self._differences()
        try:
            finite(self._model, differences)
        finally:
            self._undo()
        for position, delta in differences.items():
            residual = self._engine.selector.memories.of("residual", position)
            residual.add_(delta.reshape(-1).to(residual.device))

    def _push(self, differences: Deltas) -> None:
        """Push the differences of local steps; without any, end a push that a lost server has interrupted."""
        if differences:
            self._deltas.update(differences)
            self._undo()
        try:
            self._engine.step(None, None)
        except SparsepsError as error:
            if not isinstance(error, PatienceError):
                self._deltas.clear()
            if isinstance(error, NonFiniteGradientError):  # the local steps are undone
                self.pushed.clear()
            raise
        self._engine.pushed.clear()
        self._deltas.clear()
        self._begin_here()
        live_workers = self._engine.run.live_workers
        if not self._averages and live_workers > 1 and not self._warned:
            self._warned = True
            log.warning(
                "%d workers push local steps without rounds: the server adds all of them up. If the loss is unsteady, "
                "pass rounds=psclient.Rounds(), or a lower lr (of Outer) and no momentum",
                live_workers,
            )


def _parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
