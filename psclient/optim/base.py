"""The optimizer that every method shares: an ordinary ``torch.optim.Optimizer`` whose step goes through a server.

A training loop sees this class; the steps are in :mod:`psclient.engine.step`. The parameters change only by what the
server answers. All calls to servers are made in a thread of the optimizer's own.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, NoReturn, SupportsIndex

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from psclient import settings as client_settings
from psclient.buckets.lags import Lags
from psclient.buckets.plan import Plan
from psclient.buckets.planner import Planner
from psclient.compress.compressor import Choice, Compressor
from psclient.compress.groups import ParamGroups, Rates
from psclient.compress.hyperparameters import check_hyperparameters
from psclient.compress.method import Group, Sparse, State, Step, Whole
from psclient.data.counter import SampleCounter
from psclient.data.first_batches import FirstBatches
from psclient.engine.checks import gather, refuse_averaged
from psclient.engine.exchange import Exchange
from psclient.engine.executor import SerialExecutor
from psclient.engine.lifecycle import Lifecycle, end_earlier, has_other
from psclient.engine.push import Pusher
from psclient.engine.state import PushMark, from_sgd, is_out_of_date, restore_memories, split, taken_back
from psclient.engine.step import GradientSource, Stepper
from psclient.errors import (
    ConfigurationError,
    CopyRefusedError,
    FingerprintMismatchError,
    ServerUnreachableError,
)
from psclient.model.module import TrainedModel, describe
from psclient.model.replica import Replica
from psclient.optim.arguments import Density, check_mode, unknown_argument
from psclient.optim.calls import Calls
from psclient.report import StepReport, Totals
from psclient.rounds import Rounds
from psclient.rpc.cluster import Cluster
from psclient.rpc.local_server import start_alone
from psclient.rpc.membership import Membership
from psclient.rpc.resolver import connect
from psclient.rpc.shard import ShardClient
from psclient.settings import ClientSettings, OnLoad, Server
from pscore import jit
from pscore.select import SELECTORS
from pscore.telemetry import tracing
from pscore.wire.errors import ErrorCode

log = logging.getLogger("psclient")

_ONE_SERVER_ONE_MODEL = (
    "another optimizer of this process trains another model there: give each model a server of its own, or make one "
    "optimizer of both, with model=torch.nn.ModuleDict(...) (docs/training.md, Several models)"
)


class ParameterServerOptimizer(Optimizer, ABC):
    """Base of the methods; use one of its subclasses.

    Args:
        params: parameters or param groups.
        defaults: the method's hyper-parameters.
        density: see :data:`Density`. A function leaves groups alone that were given a density of their own.
        agreed: the method's settings in which all workers must agree, beside the common ones.
        model: the module that the parameters belong to: gives tensors their names, and buffers and samples their due.
            Without it, tensors have the names of ``model.named_parameters()`` where ``params`` has these, else they are
            named by position, and buffers stay local.
        server: ``HOST:PORT`` of each shard in order (a list, or one string with commas or a range as ``{0..3}``), one
            ``dns:///HOST:PORT`` for all, a running :class:`~psclient.LocalServer`, or ``"local"`` to start one; the
            default is ``PSCLIENT_SERVER``, then ``"local"``.
        worker: this worker's name; see :class:`~psclient.ClientSettings`.
        overlap: push while backward goes on, and fetch the reply while the next step computes: every gradient is one
            step staler, and gradients must not be touched between ``backward()`` and ``step()``.
        rounds: train synchronously; the default is to apply each push as it comes.
        on_load: what becomes of a model that the script loads into the worker later. While nobody has pushed to the
            run, it is what the run begins with. Then ``"error"`` (the default) raises ``ModelLoadedError``,
            ``"server"`` takes the server's parameters in its place, and ``"replace"`` gives it to all workers.
        settings: everything else about the connection.

    Attributes:
        gradients_are_its_own: whether it is known that the gradients are this worker's, and not the mean of several
            processes that push each: since the first step, or because :class:`~psclient.NodeOptimizer` says so.

    Raises:
        SparsepsError: the server cannot be reached, trains another model, or in another way.
    """

    name: ClassVar[str]
    momentum_is_torchs: ClassVar[bool] = False
    """Whether ``state[parameter]["momentum"]`` is what ``torch.optim.SGD`` keeps as ``momentum_buffer``."""
    server_remembers: bool = False
    """Whether the server's optimizer has a memory, which no state of a worker holds."""
    asynchronous: ClassVar[bool] = True
    """Whether all workers' updates meet in one model one by one, which adds momentum of its own."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        density: Density,
        agreed: Mapping[str, str] | None = None,
        /,
        *,
        model: torch.nn.Module | None = None,
        server: Server | None = None,
        worker: str | None = None,
        overlap: bool = False,
        rounds: Rounds | None = None,
        on_load: OnLoad | None = None,
        settings: ClientSettings | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise unknown_argument(type(self), ParameterServerOptimizer, next(iter(unknown)))
        check_mode(overlap, rounds)
        self._joined = False
        self._rounds, self._agreed = rounds, dict(agreed or {})
        self._own_density: set[int] = set()  # numbers of the groups that a density schedule leaves alone
        self.gradients_are_its_own = False
        self._loss: Any = None
        super().__init__(params, defaults | {"density": density(1) if callable(density) else density})
        if model is None:
            named = "param_names" in self.param_groups[0]
            names = (
                "" if named else "tensors are called parameter_0, parameter_1 and so on, names that no model loads; "
            )
            log.warning(
                "without model= %sbuffers stay local, and a step counts as one sample. Pass model=, on every worker",
                names,
            )
        resolved = client_settings.resolve(settings, server, worker, on_load)
        self._model = describe(model, self.param_groups, upload_frozen=resolved.upload_frozen)
        refuse_averaged(self._model.parameters, () if model is None else model.modules())
        self._groups = ParamGroups(self.param_groups, self._own_density)
        if isinstance(density, Lags):
            density.check(overlap=overlap, select_over=resolved.select_over)
        own_server = start_alone() if resolved.server == client_settings.LOCAL else None
        self._server = resolved.server if own_server is None else own_server.server
        name, others = client_settings.worker_name(resolved), has_other(self._server)
        # No call of gRPC is made in the program's thread: a signal's exception inside one leaves its locks taken.
        thread = SerialExecutor("psclient-step")
        try:
            end_earlier(self._server, name)
            thread.call(partial(self._connect, name, resolved, density), lambda: None)
        except BaseException:
            if own_server is not None:
                own_server.stop()
            raise
        leases = self._membership.leases
        self._lifecycle = Lifecycle(
            self, own_server, leases, self._stepper.abandon, flush_on_sigterm=resolved.flush_on_sigterm
        )
        self._calls = Calls(thread, self._lifecycle, self._membership, self._cluster)
        try:
            self._lifecycle.take_place(self._server, self.worker)
            self._calls.run(self._membership.join)
            self._joined = True
            counter = SampleCounter(model, FirstBatches(leases).see) if model is not None else None
            self._calls.run(lambda: self._stepper.start(counter, overlap=overlap))
        except BaseException as error:
            self.close()
            if isinstance(error, FingerprintMismatchError) and others:
                text = str(error).replace(ErrorCode.FINGERPRINT_MISMATCH.advice, _ONE_SERVER_ONE_MODEL)
                raise FingerprintMismatchError(text, error.tensor) from None
            raise

    def _connect(self, worker: str, settings: ClientSettings, density: Density) -> None:
        """Make the parts of this worker, from the servers' connections to the steps, before the first call.

        Raises:
            ConfigurationError: a server address is not one, or tracing cannot begin.
            ServerUnreachableError: behind one name for all shards, some were not found.
        """
        jit.announce = log.warning
        if settings.tracing:
            try:
                tracing.start("psclient", worker)
            except tracing.TracingError as error:
                raise ConfigurationError(str(error)) from error
        model, groups = self._model, self._groups
        connections = connect(self._server, settings.security, settings.connect_seconds)
        shards = [ShardClient(connection, index, settings) for index, connection in enumerate(connections)]
        replica = Replica(model.layout, model.parameters)
        self._membership = Membership(
            shards, worker, replica, model.buffers, self.name, self.agreed_settings(), settings
        )
        self._cluster = Cluster(shards, self._membership, replica, model.buffers)
        planner = self._planner = Planner(
            model.layout,
            settings.merge,
            group_elements=settings.group_elements,
            bucket_bytes=settings.bucket_bytes,
            dense_below=settings.dense_below,
            lags=density if isinstance(density, Lags) else None,
        )

        def density_of(position: int) -> float | None:
            return None if groups.has_own_density(model.parameters[position]) else planner.density_of(position)

        choice = Choice(SELECTORS[settings.selector], settings.select_over, settings.dense_below)
        self._compressor = Compressor(type(self), model, self.state, groups.of, choice, density_of)
        pusher = Pusher(model.layout, self._cluster, planner.groups)
        self._exchange = Exchange(self._cluster, pusher, self._compressor, planner)
        self._stepper = Stepper(
            model,
            groups,
            self._membership,
            self._cluster,
            self._exchange,
            density if callable(density) else None,
            self.rate_source(groups),
            self.gradient_source(model, groups),
            synchronous=self._rounds is not None or not self.asynchronous,
        )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What ``torch.amp.GradScaler`` asks before it unscales: with overlap too late, and nothing would tell."""
        if self._stepper.overlaps:
            raise ConfigurationError(
                "GradScaler unscales gradients after backward(), and with overlap=True they have left by then; leave "
                "overlap out, or train in bf16, which needs no scaling"
            )
        return False

    # What a method defines

    @staticmethod
    @abstractmethod
    def accumulate(state: State, group: Group, step: Step) -> Sparse | Whole:
        """See :class:`psclient.compress.method.Method`."""

    @staticmethod
    def held(state: State, group: Group) -> Sparse:
        """See :class:`psclient.compress.method.Method`."""
        return Sparse(state["residual"])

    def agreed_settings(self) -> dict[str, str]:
        """Return the settings in which all workers of a run must agree."""
        momenta = [str(float(group["momentum"])) for group in self.param_groups if "momentum" in group]
        common = {"momentum": ",".join(momenta)} if momenta else {}
        return common | ({"rounds": self._rounds.agreed()} if self._rounds is not None else {}) | self._agreed

    def positions_of(self, group: Group) -> list[int]:
        """Return the places in the layout of a group's tensors, ascending; of those that are trained."""
        positions = {id(parameter): position for position, parameter in enumerate(self._model.parameters)}
        return sorted(positions[id(each)] for each in group["params"] if id(each) in positions)

    def gradient_source(self, model: TrainedModel, groups: ParamGroups) -> GradientSource:
        """Return what collects a step's gradients; it must not refer to the optimizer, which would never be freed."""
        return partial(gather, model, groups)

    def rate_source(self, groups: ParamGroups) -> Callable[[], Rates]:
        """Return what says the learning rates of a push; it must not refer to the optimizer."""
        return groups.rates

    def gradient_scale(self, gradients: Sequence[torch.Tensor], live_workers: int) -> float:
        """Return a factor for all gradients of this step; 1 unless the method clips.

        With ``overlap=True`` nobody asks: the first gradients are sent before the last are known.
        """
        return 1.0

    def _flush(self) -> None:
        self._stepper.flush()

    def _flush_on_exit(self) -> None:
        self._flush()

    def _pull(self) -> None:
        self._stepper.pull()

    # What a training loop uses

    @property
    def report(self) -> StepReport:
        """What the last step did."""
        return self._stepper.report

    @property
    def totals(self) -> Totals:
        """Sums over all steps."""
        return self._stepper.totals

    @property
    def plan(self) -> Plan:
        """Which tensors are pushed together, with predicted and measured times: print it, or ``plan.draw(path)``."""
        return self._planner.plan

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
    def unfinished(self) -> bool:
        """True where the last step has pushed its gradients and met an error before its end.

        The next :meth:`step` completes it, unless the gradients are others by then, or there are none.
        """
        return self._stepper.unfinished

    @property
    def local_steps(self) -> int:
        """Steps that have changed this machine's parameters and are not pushed yet; 0 but with local steps."""
        return 0

    @property
    def worker(self) -> str:
        """This worker's name."""
        return self._membership.identity.worker_id

    @property
    def joined(self) -> bool:
        """Whether this worker has a place in its run yet."""
        return self._joined

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._membership.identity.run_id

    @property
    def server(self) -> str:
        """The shards as they were named: their addresses, separated by commas, or one name for all."""
        return self._server

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, samples: int | None = None) -> Any:
        """Push this step's update and bring the parameters up to the server's.

        Args:
            closure: recomputes the loss, as for any torch optimizer. Where the last step is :attr:`unfinished`, it is
                not called: that step is completed, and what the closure returned then is returned.
            samples: how many samples the gradients come from; counted at the calls of ``model`` if not given.

        Returns:
            What the closure returned.

        Raises:
            NonFiniteGradientError: nothing was sent, and without overlap nothing was changed.
            UpdateOverflowError: nothing was sent; what the step has added, where it is finite, stays in the residuals.
            ServerUnreachableError: no server within the patience; call again to go on, nothing is lost.
            RunFinishedError: the run was over before this step.
        """
        self._calls.require_open()
        self._require_own_gradients()
        if samples is not None and not (isinstance(samples, int) and 0 <= samples < 1 << 48):
            raise ConfigurationError(f"samples must be a number of samples, not {samples!r}")
        if closure is not None and not callable(closure):
            raise ConfigurationError(f"step() takes a closure or nothing, not {closure!r}")
        if closure is not None and not self.unfinished:
            with torch.enable_grad():
                self._loss = closure()
        self._calls.run(lambda: self._step(samples))
        self._completed()  # not in the thread: a step that ended unseen by its caller is the same still
        loss, self._loss = self._loss, None
        return loss

    def _step(self, samples: int | None) -> None:
        self._stepper.step(samples, self.gradient_scale)

    def _completed(self) -> None:
        """Note that the caller of a step knows of its end: the same gradients again are another step's."""
        self._stepper.completed()

    def accumulating(self) -> AbstractContextManager[None]:
        """With overlap: run the backward passes in the body without handing their gradients over.

        For gradient accumulation: wrap all but the last backward pass before a ``step()``. Without overlap this does
        nothing.
        """
        return self._stepper.accumulating()

    def flush(self) -> None:
        """Push everything that this worker still holds, at density 1; :meth:`pull` brings it back into the parameters.

        Raises:
            ServerUnreachableError: no server within the patience.
        """
        self._calls.run(self._flush)

    def flush_on_exit(self) -> None:
        """Push what a worker should leave behind when it goes, or waits for others: :meth:`flush`, or local steps.

        Raises:
            ServerUnreachableError: no server within the patience.
        """
        self._calls.run(self._flush_on_exit)

    def pull(self) -> None:
        """Make the parameters the server's without pushing, before an evaluation, say.

        After top-k replies the whole model is fetched, because a top-k reply leaves small differences out. Local steps
        since the last push stay, on top of the server's values.

        Raises:
            ServerUnreachableError: no server within the patience.
        """
        self._calls.run(self._pull)

    def hurry(self, seconds: float) -> None:
        """Wait no longer than this for a server from now on."""
        self._membership.hurry(seconds)

    def close(self) -> None:
        """Leave the run and free everything; stops an embedded server. Harmless twice.

        Called at exit by itself; and the worker of an optimizer that is collected before leaves too.
        """
        self._calls.close(self._stepper.leave)

    def __enter__(self) -> "ParameterServerOptimizer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as for any torch optimizer; after joining, its parameters must belong to ``model``.

        Raises:
            ConfigurationError: a parameter is not part of what was joined with, or a value is out of its range.
        """
        has_own_density, number = "density" in param_group, len(self.param_groups)
        super().add_param_group(param_group)
        try:
            self._check_added(self.param_groups[-1])
        except ConfigurationError:
            self.param_groups.pop()
            raise
        if has_own_density:
            self._own_density.add(number)
        if self._joined:
            self._groups.assign(self.param_groups)

    def _check_added(self, group: Group) -> None:
        check_hyperparameters(group)
        if not self._joined:
            return
        if not {id(parameter) for parameter in group["params"]} <= {id(known) for known in self._model.parameters}:
            raise ConfigurationError(
                "a parameter that was not part of the model, or was frozen, cannot be added after joining a server; to "
                "thaw parameters later, set upload_frozen=True (PSCLIENT_UPLOAD_FROZEN) on all workers"
            )
        if self._stepper.begun:
            raise ConfigurationError("a group cannot be added between backward() and step() with overlap=True")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as for any torch optimizer.

        With overlap, between ``backward()`` and ``step()``: a batch is skipped. What had been handed over by then stays
        in the residuals.
        """
        if self._stepper.begun and not self._lifecycle.in_child:
            self._calls.always(self._stepper.forget)
        super().zero_grad(set_to_none)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return residuals, hyper-parameters, and which push of which incarnation they belong to.

        A push that is still in doubt is part of the residuals returned: if it turns out to have been applied, they are
        recognised as out of date when they are loaded.
        """
        return self._calls.always(self._state_dict)

    def _state_dict(self) -> dict[str, Any]:
        try:
            self._stepper.drain()
        except ServerUnreachableError as error:
            log.warning("saving the state with a push in doubt: %s", error)
        state = taken_back(self.state, self._exchange, super().state_dict)
        state["psclient"] = self._mark().plain()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take residuals and hyper-parameters over.

        Residuals that are older than the last push that the server has applied from this worker hold gradients that
        were sent since; they are dropped, with a warning. A state of ``torch.optim.SGD`` gives its rates and weight
        decay, and its momentum where the method has the same.

        Raises:
            ConfigurationError: another method, or another optimizer, has saved it; the message says how to go on.
        """
        if self._lifecycle.in_child:
            self._calls.require_open()
        mark, plain = split(state_dict, self.name)
        if mark is None:
            plain = self._from_torch(plain)
        self._calls.always(self._stepper.rest)  # a push that is applied later would count beside what is loaded
        super().load_state_dict(plain)
        self._assign_groups()
        self._compressor.memories = self.state  # torch has put a new dict in the place of the old one
        restore_memories(self, plain)
        if mark is None:
            return
        now, last_push = self._mark(), self._membership.last_push_record
        if is_out_of_date(mark, now, last_push, server_remembers=self.server_remembers):
            self.state.clear()
        self._exchange.step = max(self._exchange.step, mark.step)

    def _mark(self) -> PushMark:
        return PushMark.now(self.name, self._membership, self._exchange)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled: a copy would have no place in the run.

        Raises:
            CopyRefusedError: always.
        """
        raise CopyRefusedError(type(self).__name__)

    # Inner parts

    def _from_torch(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state of an optimizer of torch's as one of this method."""
        return from_sgd(state, self.param_groups, self.name, keeps_momentum=self.momentum_is_torchs)

    def _assign_groups(self) -> None:
        """Note that all param groups were loaded."""
        self._groups.assign(self.param_groups)

    def _require_own_gradients(self) -> None:
        """Refuse averaged gradients and shared parameters at the first step: a script may wrap or share late."""
        if not self.gradients_are_its_own:
            refuse_averaged(self._model.parameters)
            self._model.refuse_shared()
            self.gradients_are_its_own = True
