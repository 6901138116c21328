"""The optimizer that every method shares: an ordinary ``torch.optim.Optimizer`` whose step goes through a server.

One step: check the gradients, compress group by group and stream each as it is ready, settle the push, fetch the reply,
apply it (:mod:`psclient.exchange`); or, with overlap, the same beside the computation (:mod:`psclient.overlap`). The
parameters change only by what the server answers.
"""

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from psclient import settings as client_settings
from psclient.cluster import Cluster
from psclient.compression import Choice, Compressor
from psclient.errors import (
    STEP_AGAIN,
    ConfigurationError,
    NonFiniteGradientError,
    RunFinishedError,
    ServerUnreachableError,
)
from psclient.exchange import Exchange
from psclient.gradients import Interrupted, finite, gather
from psclient.hyperparameters import MomentumAdvice, check_hyperparameters
from psclient.lifecycle import Lifecycle
from psclient.local import LocalServer, start_alone
from psclient.membership import Membership
from psclient.methods.base import Group, Sent, Sparse, State, Step
from psclient.model import SampleCounter, describe
from psclient.overlap import Overlap
from psclient.push import Pusher
from psclient.replica import Replica
from psclient.report import StepReport, Totals
from psclient.settings import ClientSettings
from psclient.shard import ShardClient
from psclient.state import PushMark, restore_memories, stale_residuals
from pscore.selectors import SELECTORS

log = logging.getLogger("psclient")

Density = float | Callable[[int], float]
"""Share of a tensor's entries that is sent: a number, or a function of the worker's step (from 1)."""

Server = str | Sequence[str] | LocalServer

_CLOSING_SECONDS = 5.0  # an end must not wait for a server that is gone


class ParameterServerOptimizer(Optimizer, ABC):
    """Base of the methods; use one of its subclasses.

    Args:
        params: parameters or param groups.
        defaults: the method's hyper-parameters.
        density: see :data:`Density`.
        model: the module that the parameters belong to: gives tensors their names, and buffers and samples their due.
            Without it, tensors are named by position, and buffers stay local.
        server: ``HOST:PORT`` of each shard in order (a list, or one string with commas), a running
            :class:`~psclient.LocalServer`, or ``"local"`` to start one; the default is ``PSCLIENT_SERVER``, then
            ``"local"``.
        worker: this worker's name; see :class:`~psclient.ClientSettings`.
        overlap: push while backward goes on, and fetch the reply while the next step computes: every gradient is one
            step staler, and gradients must not be touched between ``backward()`` and ``step()``.
        settings: everything else about the connection.

    Raises:
        SparsepsError: the server cannot be reached, trains another model, or in another way.

    Attributes:
        report: what the last step did.
        totals: sums over all steps.
    """

    name: ClassVar[str]

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        density: Density,
        *,
        model: torch.nn.Module | None = None,
        server: Server | None = None,
        worker: str | None = None,
        overlap: bool = False,
        settings: ClientSettings | None = None,
    ) -> None:
        """Join the server, and upload the model or take over the server's."""
        self._joined = False
        self._density_schedule = density if callable(density) else None
        defaults["density"] = density(1) if callable(density) else density
        super().__init__(params, defaults)
        self._settings = client_settings.resolve(settings, _addresses(server), worker)
        self._group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        self._model = describe(model, [p for group in self.param_groups for p in group["params"]])
        self._layout = self._model.layout
        self._samples_since_exchange = 0
        self._momentum_advice = MomentumAdvice()
        self.report = StepReport(0)
        self.totals = Totals()

        own_local = start_alone() if self._settings.server == client_settings.LOCAL else None
        addresses = client_settings.addresses((own_local or self._settings).server)
        shards = [ShardClient(address, i, self._settings) for i, address in enumerate(addresses)]
        replica = Replica(self._layout, self._model.parameters)
        self._membership = Membership(
            shards,
            client_settings.worker_name(self._settings),
            replica,
            self._model.buffers,
            self.name,
            self.agreed_settings(),
            self._settings,
        )
        self._cluster = Cluster(shards, self._membership, replica, self._model.buffers)
        self._exchange = Exchange(
            self._cluster,
            Pusher(self._layout, self._cluster, self._settings.group_elements),
            Compressor(
                type(self),
                self._model,
                self.state,
                self._hyperparameters,
                Choice(SELECTORS[self._settings.selector], self._settings.select_over, self._settings.dense_below),
            ),
        )
        self._overlap: Overlap | None = None
        self._interrupted = Interrupted()
        self._lifecycle = Lifecycle(self, own_local, flush_on_sigterm=self._settings.flush_on_sigterm)
        try:
            self._membership.join()
            self._joined = True
            self._samples = SampleCounter(model) if model is not None else None
            self._exchange.count(self.report, self._cluster.pull())
            self.report.buffer_bytes = self._cluster.exchange_buffers(0, 0, adopt=True)
            if overlap:
                self._overlap = self._start_overlap()
        except BaseException:
            self.close()
            raise
        self.totals.add(self.report)
        self.totals.upload_bytes = self._membership.upload_bytes

    # What a method defines

    @staticmethod
    @abstractmethod
    def accumulate(state: State, group: Group, step: Step) -> Sparse | torch.Tensor:
        """See :class:`psclient.methods.base.Method`."""

    @staticmethod
    @abstractmethod
    def held(state: State, group: Group) -> Sparse | None:
        """See :class:`psclient.methods.base.Method`."""

    @staticmethod
    @abstractmethod
    def give_back(state: State, group: Group, returned: Sent, like: torch.Tensor) -> None:
        """See :class:`psclient.methods.base.Method`."""

    def agreed_settings(self) -> dict[str, str]:
        """Return the settings in which all workers of a run must agree."""
        momenta = [str(float(group["momentum"])) for group in self.param_groups if "momentum" in group]
        return {"momentum": ",".join(momenta)} if momenta else {}

    def gradient_scale(self, gradients: Sequence[torch.Tensor], live_workers: int) -> float:
        """Return a factor for all gradients of this step; 1 unless the method clips."""
        return 1.0

    # What a training loop uses

    @property
    def version(self) -> int:
        """The coordinator's version that this worker has seen: updates applied from all workers."""
        return self._membership.coordinator.version

    @property
    def finished(self) -> bool:
        """True once the run is over; leave the loop then."""
        return self._membership.run_finished

    @property
    def live_workers(self) -> int:
        """Workers alive, as last heard."""
        return self._membership.live_workers

    @property
    def worker(self) -> str:
        """This worker's name."""
        return self._membership.identity.worker_id

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._membership.identity.run_id

    @property
    def server(self) -> str:
        """The addresses of the shards, separated by commas."""
        return ",".join(shard.address for shard in self._cluster.shards)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, samples: int | None = None) -> Any:
        """Push this step's update and bring the parameters up to the server's.

        Args:
            closure: recomputes the loss, as for any torch optimizer.
            samples: how many samples the gradients come from; counted at ``model``'s forward if not given.

        Returns:
            What the closure returned.

        Raises:
            NonFiniteGradientError: nothing was changed or sent.
            ServerUnreachableError: no server within the patience; call again to go on, nothing is lost.
            RunFinishedError: the run was over before this step.
        """
        self._require_open()
        if samples is not None and not (isinstance(samples, int) and 0 <= samples < 1 << 48):
            raise ConfigurationError(f"samples must be a number of samples, not {samples!r}")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._lifecycle.busy():
            if self.finished:
                raise RunFinishedError(f"run {self.run_id!r} is over; leave the loop when optimizer.finished is true")
            self._take_step(samples) if self._overlap is None else self._take_overlapped_step(self._overlap, samples)
        return loss

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """With overlap: run the backward passes in the body without handing their gradients over.

        For gradient accumulation: wrap all but the last backward pass before a ``step()``. Without overlap this does
        nothing.
        """
        if self._overlap is None:
            yield
            return
        with self._overlap.accumulating():
            yield

    @torch.no_grad()
    def flush(self) -> None:
        """Push everything that this worker still holds, at density 1; :meth:`pull` brings it back into the parameters.

        Raises:
            ServerUnreachableError: no server within the patience.
        """
        self._require_open()
        with self._lifecycle.busy():
            self._drain()
            self._settle_doubt()
            if self.finished:
                return
            report = self.report = self._exchange.open(samples=0)
            self._push(report, lambda number: self._exchange.send_held(report, number))
            self.totals.add(report)

    @torch.no_grad()
    def pull(self) -> None:
        """Bring the parameters up to the server's without pushing, before an evaluation, say.

        Raises:
            ServerUnreachableError: no server within the patience.
        """
        self._require_open()
        with self._lifecycle.busy():
            self._drain()
            self._settle_doubt()
            report = StepReport(self._exchange.step)
            self._exchange.count(report, self._cluster.pull())
            self.totals.add(report)

    def hurry(self, seconds: float) -> None:
        """Wait no longer than this for a server from now on."""
        self._membership.hurry(seconds)

    def close(self) -> None:
        """Leave the run and free everything; stops an embedded server. Called at exit by itself; harmless twice."""
        if self._lifecycle.ended or self._lifecycle.in_child:
            return
        self._lifecycle.ended = True
        self.hurry(_CLOSING_SECONDS)
        try:
            self._membership.quietly(self._drain)
            if self._joined:
                if self._samples is not None:
                    self._samples.close()
                if self._samples_since_exchange and not self._cluster.in_doubt:
                    self._membership.quietly(lambda: self._exchange_at_end(self._samples_since_exchange))
        finally:
            self._cluster.close()
            if self._overlap is not None:
                self._overlap.close()
            self._lifecycle.release()

    def __enter__(self) -> "ParameterServerOptimizer":
        """Return the optimizer."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the run."""
        self.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as for any torch optimizer; after joining, its parameters must belong to ``model``.

        Raises:
            ConfigurationError: a parameter is not part of what was joined with, or a value is out of its range.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_hyperparameters(group)
        if not self._joined:
            return
        known = {id(parameter) for parameter in self._model.parameters}
        if any(id(parameter) not in known for parameter in group["params"]):
            self.param_groups.pop()
            raise ConfigurationError("a parameter that is not part of the model cannot be added after joining a server")
        if self._overlap is not None and self._overlap.begun:
            self.param_groups.pop()
            raise ConfigurationError("a group cannot be added between backward() and step() with overlap=True")
        self._group_of.update({id(parameter): group for parameter in group["params"]})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as for any torch optimizer.

        With overlap, between ``backward()`` and ``step()``: a batch is skipped. What had been handed over by then stays
        in the residuals.
        """
        if self._overlap is not None and self._overlap.begun and not self._lifecycle.in_child:
            self._overlap.forget()
        super().zero_grad(set_to_none)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return residuals, hyper-parameters, and which push of which incarnation they belong to.

        A push that is still in doubt is part of the residuals returned: if it turns out to have been applied, they are
        recognised as out of date when they are loaded.
        """
        with torch.no_grad(), self._lifecycle.busy():
            try:
                self._drain()
            except ServerUnreachableError as error:
                log.warning("saving the state with a push in doubt: %s", error)
            return self._state_dict()

    def _state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._exchange.in_doubt:
            kept = {parameter: copy.deepcopy(memories) for parameter, memories in self.state.items()}
            self._exchange.give_back(self._cluster.held_parts())
            state = copy.deepcopy(super().state_dict())
            self.state.update(kept)
        incarnation, exchange = self._membership.identity.incarnation, self._exchange
        mark = PushMark(self.worker, incarnation, exchange.acknowledged_step, exchange.step)
        state["psclient"] = mark.plain()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take residuals and hyper-parameters over.

        Residuals that are older than the last push that the server has applied from this worker hold gradients that
        were sent since; they are dropped, with a warning.
        """
        plain = {name: value for name, value in state_dict.items() if name != "psclient"}
        for group in plain["param_groups"]:
            if lacking := sorted(self.defaults.keys() - group.keys()):
                raise ConfigurationError(f"this state is another optimizer's: it has no {', '.join(lacking)}")
            check_hyperparameters(group)
        with torch.no_grad(), self._lifecycle.busy():
            self._drain()
            self._settle_doubt()  # a push that is applied later would count beside what is loaded
        super().load_state_dict(plain)
        self._group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        restore_memories(self, plain)
        mark = PushMark.from_plain(state_dict.get("psclient"))
        if mark is None:
            return
        known = self._membership.last_push_record
        if self._exchange.acknowledged_step:
            known = (self._membership.identity.incarnation, self._exchange.acknowledged_step)
        if stale_residuals(mark, known):
            log.warning(
                "this state was saved at step %d of worker %s, and the server has applied a later push: its residuals "
                "were sent since and are dropped; training goes on from the server's parameters",
                mark.acknowledged_step,
                mark.worker,
            )
            self.state.clear()
        self._exchange.step = max(self._exchange.step, mark.step)

    # Inner parts

    def _require_open(self) -> None:
        if self._lifecycle.in_child:
            raise ConfigurationError("this process was forked from the optimizer's; make an optimizer of its own here")
        if self._lifecycle.ended:
            raise ConfigurationError("this optimizer has left its run (close()); make a new one to go on")

    def _take_step(self, samples: int | None) -> None:
        found = self._gather(range(len(self._model.parameters)))
        if self._interrupted.holds(found):
            self._settle_doubt()
            self._receive(self.report)
            return
        gradients = finite(self._model, found)
        self._settle_doubt()
        clip = self.gradient_scale(list(gradients.values()), self.live_workers)
        report = self.report = self._begin_step(samples)
        self._interrupted.note(found)  # from the commit on these gradients are pushed, whatever becomes of the reply
        try:
            self._push(report, lambda number: self._exchange.send_gradients(report, number, gradients, clip))
        except NonFiniteGradientError:
            self._interrupted.clear()
            raise
        self._receive(report)

    def _receive(self, report: StepReport) -> None:
        """Fetch the reply to a settled push, apply it, and end the step."""
        with report.timed("wait"):
            replies = self._exchange.fetch()
        report.move(max(reply.decode_seconds for reply in replies.values()), "wait", "apply")
        self._exchange.apply(report, replies)
        self._end_step(report)
        self._interrupted.clear()

    def _take_overlapped_step(self, overlap: Overlap, samples: int | None) -> None:
        if samples is not None:
            raise ConfigurationError(
                "with overlap=True samples are counted at the forward of model=; leave samples out"
            )
        found = self._gather(range(len(self._model.parameters)))
        if not overlap.begun and self._interrupted.holds(found):
            self._drain()
            self._settle_doubt()
            self._receive(self.report)
            return
        report = self.report = overlap.finish()
        self._interrupted.note(found)
        with report.timed("wait"):
            replies = overlap.collect()
        if replies is not None:
            self._exchange.apply(report, replies)
        overlap.launch(report)
        self._end_step(report)
        self._interrupted.clear()

    def _begin_step(self, samples: int | None = None) -> StepReport:
        """Open the push of a new step, at the density that the schedule gives it."""
        if self._density_schedule is not None:
            density = self._density_schedule(self._exchange.step + 1)
            check_hyperparameters({"density": density})
            for group in self.param_groups:
                group["density"] = density
        counted = self._samples.take() if self._samples is not None else 1
        samples = counted if samples is None else samples
        self._samples_since_exchange += samples
        self.totals.samples += samples
        return self._exchange.open(samples)

    def _end_step(self, report: StepReport) -> None:
        if report.step % self._membership.run_settings.buffer_period_steps == 0:
            with report.timed("buffers"):
                report.buffer_bytes = self._cluster.exchange_buffers(report.step, self._samples_since_exchange)
            self._samples_since_exchange = 0
        self.totals.add(report)
        self.totals.upload_bytes = self._membership.upload_bytes
        self._momentum_advice.check(self.live_workers, self.param_groups)

    def _push(self, report: StepReport, send: Callable[[int], None]) -> None:
        """Send every group of the open push, commit, and settle."""
        try:
            for number in range(len(self._exchange.groups)):
                send(number)
            self._exchange.commit(report)
        except BaseException:
            self._exchange.abandon()
            raise
        with report.timed("wait"):
            self._exchange.settle(report)

    def _exchange_at_end(self, samples: int) -> None:
        self.totals.buffer_bytes += self._cluster.exchange_buffers(self._exchange.step, samples)

    def _settle_doubt(self) -> None:
        if self._exchange.in_doubt:
            self._exchange.settle(self.report)

    def _drain(self) -> None:
        """With overlap: end what goes on in the background, and apply the reply that is awaited."""
        if self._overlap is None or self._lifecycle.in_child:
            return
        seconds = self._membership.seconds_left
        try:
            self._overlap.break_off(seconds)
            replies = self._overlap.collect(seconds)
        except TimeoutError:
            address = self._membership.coordinator.address
            raise ServerUnreachableError(address, seconds or 0.0, "a reply is awaited", STEP_AGAIN) from None
        if replies is not None:
            report = StepReport(self._exchange.step)
            self._exchange.apply(report, replies)
            self.totals.add(report)

    def _start_overlap(self) -> Overlap:
        def trained() -> dict[int, torch.Tensor]:
            return {
                position: parameter
                for position, parameter in enumerate(self._model.parameters)
                if parameter.requires_grad and id(parameter) in self._group_of
            }

        def begin() -> StepReport:
            self._settle_doubt()
            return self._begin_step()

        return Overlap(self._exchange, trained, begin, self._gather, lambda found: finite(self._model, found))

    def _gather(self, positions: range) -> dict[int, torch.Tensor]:
        return gather(self._model, self._group_of, positions)

    def _hyperparameters(self, parameter: torch.Tensor) -> Group | None:
        group = self._group_of.get(id(parameter))
        return None if group is None else {**group, "lr": float(group["lr"])}


def _addresses(server: Server | None) -> str | None:
    if isinstance(server, LocalServer):
        return server.server
    return server if server is None or isinstance(server, str) else ",".join(server)
