"""Steps on this machine, and the push of what they have done."""

import logging

import torch
from torch.optim import Optimizer

from psclient.compress.groups import ParamGroups
from psclient.compress.method import memory
from psclient.engine.checks import RetryGuard, finite, gather
from psclient.engine.step import GradientScale, Stepper
from psclient.engine.worker import Worker
from psclient.errors import ConfigurationError, NonFiniteGradientError, ServerUnreachableError, SparsepsError
from psclient.model.module import TrainedModel

log = logging.getLogger("psclient")

Deltas = dict[int, torch.Tensor]
"""Differences that local steps have made, by position in the layout, fp32."""


class LocalSteps:
    """Takes the steps of ``inner`` on this machine, and pushes after each ``sync_every``; in the worker's thread.

    ``stepper`` pushes ``deltas``, which are filled here and empty between two pushes; ``in_rounds`` the server takes
    the mean of the workers' differences, else it adds them up. ``local_steps`` counts those since the last push.
    """

    def __init__(
        self,
        inner: Optimizer,
        sync_every: int,
        deltas: Deltas,
        worker: Worker,
        stepper: Stepper,
        model: TrainedModel,
        groups: ParamGroups,
        *,
        in_rounds: bool,
    ) -> None:
        self.inner, self.local_steps = inner, 0
        self._sync_every, self._deltas, self._in_rounds = sync_every, deltas, in_rounds
        self._worker, self._stepper, self._model, self._groups = worker, stepper, model, groups
        self._trained_samples = 0  # in the local steps since the last push
        self._retry_guard = RetryGuard()
        self._warned = False
        self.start = [parameter.detach().clone() for parameter in model.parameters]

    @property
    def unfinished(self) -> bool:
        """Whether the push after ``sync_every`` steps has met an error, and the last local step is done."""
        return self._retry_guard.matches(self._gradients())

    def completed(self) -> None:
        """Note that the caller of a step knows of its end: the same gradients again are another step's."""
        self._retry_guard.clear()

    def step(self, samples: int | None, scale: GradientScale) -> None:
        """Take a local step, and after ``sync_every`` of them push."""
        if samples is not None:
            raise ConfigurationError("Outer counts samples at the calls of model=; leave samples out")
        gradients = self._gradients()
        self._settle()
        if self._retry_guard.matches(gradients):
            return
        self._retry_guard.note(gradients)
        try:
            self.inner.step()
        except BaseException:
            self._retry_guard.clear()
            raise
        finally:
            self._worker.cluster.replica.accept()
        self.local_steps += 1
        self._trained_samples = max(1, self._stepper.samples_waiting)
        if self.local_steps >= self._sync_every:
            self._push_ahead()

    def flush(self) -> None:
        """Push what the local steps have done so far and everything that this worker still holds, at density 1."""
        self._settle()
        samples = 0
        if self.local_steps:
            samples = self._trained_samples
            self._move_to_residuals()
        self._stepper.flush(samples)

    def flush_on_exit(self) -> None:
        """Push what the local steps have done so far, as after ``sync_every`` of them, and take the answer over.

        The error stays here. It may hold the same way several times over, since each period begins without what was
        not sent: all of it at once can lead beyond where any worker has been.
        """
        self._settle()
        if self.local_steps:
            self._push_ahead()

    def pull(self) -> None:
        """Bring the parameters up to the server's; the local steps since the last push stay, on top of them."""
        self._settle(drops=True)
        ahead, steps = self._ahead(), self.local_steps
        self._undo()
        try:
            self._stepper.pull()
        finally:  # also where it failed: what has come of it by then is the server's, and no step of this worker
            self._begin_here()
            self.local_steps = steps
            for position, delta in ahead.items():
                parameter = self._model.parameters[position]
                parameter.sub_(delta.to(parameter.dtype))
            self._worker.cluster.replica.accept()

    def _gradients(self) -> dict[int, torch.Tensor]:
        return gather(self._model, self._groups, range(len(self._model.parameters)))

    def _settle(self, *, drops: bool = False) -> None:
        """Bring an earlier push to its end, and what was loaded to the server, or the server's model here."""
        if self._deltas:
            self._push()
        if self._stepper.settle_load(drops=drops):
            self._begin_here()
            self.local_steps = 0

    def _ahead(self) -> Deltas:
        return {
            position: start.float() - parameter.float()
            for position, (parameter, start) in enumerate(zip(self._model.parameters, self.start, strict=True))
            if parameter in self._groups and parameter.numel()
        }

    def _undo(self) -> None:
        """Undo the local steps, so that the parameters are what the server knows."""
        for parameter, start in zip(self._model.parameters, self.start, strict=True):
            if parameter in self._groups:
                parameter.copy_(start)
        self._worker.cluster.replica.accept()
        self.local_steps = 0

    def _move_to_residuals(self) -> None:
        """Undo the local steps, and add their differences to the residuals."""
        ahead = self._ahead()
        try:
            finite(self._model, ahead)
        finally:
            self._undo()
        for position, delta in ahead.items():
            parameter = self._model.parameters[position]
            memory(self._worker.compressor.memories[parameter], "residual", parameter).add_(delta.reshape(-1))

    def _push_ahead(self) -> None:
        self._deltas.update(self._ahead())
        self._push()

    def _push(self) -> None:
        """Push the differences, or bring a push of them to its end that a lost server has interrupted."""
        if self.local_steps:  # they are in the differences
            self._undo()
        try:
            self._stepper.step(None, lambda gradients, live_workers: 1.0)
        except SparsepsError as error:
            if not isinstance(error, ServerUnreachableError):
                self._deltas.clear()
            if isinstance(error, NonFiniteGradientError):  # the local steps are undone
                self._retry_guard.clear()
            raise
        self._stepper.completed()
        self._deltas.clear()
        self._begin_here()
        live_workers = self._worker.membership.live_workers
        if not self._in_rounds and live_workers > 1 and not self._warned:
            self._warned = True
            log.warning(
                "%d workers push local steps without rounds: the server adds all of them up. If the loss is unsteady, "
                "pass rounds=psclient.Rounds(), or a lower lr (of Outer) and no momentum",
                live_workers,
            )

    def _begin_here(self) -> None:
        for parameter, start in zip(self._model.parameters, self.start, strict=True):
            start.copy_(parameter)
