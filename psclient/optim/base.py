"""The optimizer that every method shares: an ordinary ``torch.optim.Optimizer`` whose step goes through a server.

It is what a training loop sees; the steps are in :mod:`psclient.engine.step`. The parameters change only by what the
server answers.
"""

import difflib
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, NoReturn, SupportsIndex, TypeVar

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from psclient import settings as client_settings
from psclient.buckets.lags import Lags
from psclient.buckets.plan import BucketPlan
from psclient.compress.groups import ParamGroups, Rates
from psclient.compress.hyperparameters import check_hyperparameters
from psclient.compress.method import Group, Sparse, State, Step, Whole
from psclient.data.counter import SampleCounter
from psclient.data.first_batches import FirstBatches
from psclient.engine.checks import gather, refuse_averaged
from psclient.engine.lifecycle import Lifecycle, end_earlier, has_other
from psclient.engine.state import PushMark, from_sgd, restore_memories, split, stale_residuals, state_as_refused
from psclient.engine.step import CLOSING_SECONDS, GradientSource, Stepper
from psclient.errors import ConfigurationError, CopyRefusedError, FingerprintMismatchError, ServerUnreachableError
from psclient.executor import SerialExecutor
from psclient.model.module import TrainedModel, describe
from psclient.optim.session import open_session
from psclient.report import StepReport, Totals
from psclient.rounds import Rounds
from psclient.rpc.local_server import Server, server_string, start_alone
from psclient.settings import ClientSettings, OnLoad
from pscore.wire.errors import ErrorCode

log = logging.getLogger("psclient")

Result = TypeVar("Result")

_ONE_SERVER_ONE_MODEL = (
    "another optimizer of this process trains another model there: give each model a server of its own, or make one "
    "optimizer of both, with model=torch.nn.ModuleDict(...) (docs/training.md, Several models)"
)
_LEAVING_SECONDS = 5.0  # for calls whose answers are of no consequence, and threads that end

Density = float | Callable[[int], float]
"""Share of a tensor's entries that is sent: a number, or a function of the worker's step (from 1)."""


class ParameterServerOptimizer(Optimizer, ABC):
    """Base of the methods; use one of its subclasses.

    Args:
        params: parameters or param groups.
        defaults: the method's hyper-parameters.
        density: see :data:`Density`.
        model: the module that the parameters belong to: gives tensors their names, and buffers and samples their due.
            Without it, tensors are named by position, and buffers stay local.
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
        """Join the server, and upload the model or take over the server's."""
        if unknown:
            raise ConfigurationError(_unknown_arguments(type(self), unknown))
        if overlap and rounds is not None:
            raise ConfigurationError(
                "overlap=True makes every gradient one step staler, and a synchronous round takes none that is stale; "
                "leave overlap or rounds out"
            )
        if rounds is not None and not isinstance(rounds, Rounds):
            raise ConfigurationError(f"rounds must be psclient.Rounds(...), not {rounds!r}")
        if not isinstance(overlap, bool):
            raise ConfigurationError(f"overlap= must be True or False, not {overlap!r}")
        if model is None:
            log.warning(
                "without model= tensors are called parameter_0, parameter_1 and so on, names that no model loads; "
                "buffers stay local, and a step counts as one sample. Pass model=, on every worker"
            )
        self._joined = False
        self._rounds = rounds
        self.gradients_are_its_own = False
        self._loss: Any = None
        defaults["density"] = density(1) if callable(density) else density
        super().__init__(params, defaults)
        resolved = client_settings.resolve(settings, server_string(server), worker, on_load)
        given = [p for group in self.param_groups for p in group["params"]]
        self._model = describe(model, given, upload_frozen=resolved.upload_frozen)
        refuse_averaged(self._model.parameters, () if model is None else model.modules())
        self._groups = ParamGroups(self.param_groups)
        lags = density if isinstance(density, Lags) else None
        if lags is not None:
            lags.check(overlap=overlap, select_over=resolved.select_over)
        # No call of gRPC is made in the program's thread: a signal's exception inside one leaves its locks taken.
        self._thread = SerialExecutor("psclient-step")
        own_server = start_alone() if resolved.server == client_settings.LOCAL else None
        server_name = resolved.server if own_server is None else own_server.server
        others = has_other(server_name)
        try:
            end_earlier(server_name, client_settings.worker_name(resolved))
            agreed = self.agreed_settings()
            session = self._thread.call(
                partial(
                    open_session,
                    type(self),
                    agreed,
                    self._model,
                    self._groups,
                    self.state,
                    server_name,
                    resolved,
                    lags,
                ),
                lambda: None,
            )
        except BaseException:
            if own_server is not None:
                own_server.stop()
            raise
        self._server, self._planner = session.server, session.planner
        self._membership, self._cluster, self._push_pull = session.membership, session.cluster, session.push_pull
        self._compressor = session.compressor
        schedule = density if callable(density) else None
        self._stepper = Stepper(
            self._model,
            self._groups,
            self._cluster,
            self._push_pull,
            schedule,
            self.rate_source(self._groups),
            self.gradient_source(self._model, self._groups),
            synchronous=rounds is not None or not self.asynchronous,
        )
        self._lifecycle = Lifecycle(
            self,
            own_server,
            self._membership.leases,
            self._stepper.abandon,
            flush_on_sigterm=resolved.flush_on_sigterm,
        )
        first_batches = FirstBatches(self._membership.leases)
        try:
            self._lifecycle.take_place(self._server, self.worker)
            self._run(self._membership.join)
            self._joined = True
            counter = SampleCounter(model, first_batches.see) if model is not None else None
            self._run(lambda: self._stepper.start(counter, overlap=overlap))
        except BaseException as error:
            self.close()
            if isinstance(error, FingerprintMismatchError) and others:
                raise FingerprintMismatchError(
                    str(error).replace(ErrorCode.FINGERPRINT_MISMATCH.advice, _ONE_SERVER_ONE_MODEL), error.tensor
                ) from None
            raise

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
        agreed = {"momentum": ",".join(momenta)} if momenta else {}
        return agreed | ({"rounds": self._rounds.agreed()} if self._rounds is not None else {})

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

    def _hand_in(self) -> None:
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
    def plan(self) -> BucketPlan:
        """Which tensors are pushed together, with predicted and measured times: print it."""
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
        self._require_open()
        self._require_own_gradients()
        if samples is not None and not (isinstance(samples, int) and 0 <= samples < 1 << 48):
            raise ConfigurationError(f"samples must be a number of samples, not {samples!r}")
        if closure is not None and not callable(closure):
            raise ConfigurationError(f"step() takes a closure or nothing, not {closure!r}")
        if closure is not None and not self.unfinished:
            with torch.enable_grad():
                self._loss = closure()
        self._run(lambda: self._step(samples))
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
        self._run(self._flush)

    def flush_on_exit(self) -> None:
        """Push what a worker should leave behind when it goes, or waits for others: :meth:`flush`, or local steps.

        Raises:
            ServerUnreachableError: no server within the patience.
        """
        self._run(self._hand_in)

    def pull(self) -> None:
        """Make the parameters the server's without pushing, before an evaluation, say.

        After top-k replies the whole model is fetched, because a top-k reply leaves small differences out. Local steps
        since the last push stay, on top of the server's values.

        Raises:
            ServerUnreachableError: no server within the patience.
        """
        self._run(self._pull)

    def hurry(self, seconds: float) -> None:
        """Wait no longer than this for a server from now on."""
        self._membership.set_deadline(seconds)

    def close(self) -> None:
        """Leave the run and free everything; stops an embedded server. Harmless twice.

        Called at exit by itself; and the worker of an optimizer that is collected before leaves too.
        """
        if self._lifecycle.ended or self._lifecycle.in_child:
            return
        self._membership.set_deadline(CLOSING_SECONDS)
        self._thread.cancel()  # only what nobody waits for can be under way: the last call was interrupted
        self._cluster.cancel_unawaited()
        leaving = self._thread.submit(torch.no_grad()(self._stepper.leave))  # goes on where the wait is interrupted
        self._lifecycle.ended = True
        try:
            leaving.result(CLOSING_SECONDS + _LEAVING_SECONDS)
            self._thread.close(_LEAVING_SECONDS)
        except TimeoutError:
            log.warning("worker %s could not leave in time; its lease ends by itself", self.worker)
        finally:
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
        try:
            self._check_added(self.param_groups[-1])
        except ConfigurationError:
            self.param_groups.pop()
            raise
        if self._joined:
            self._groups.assign(self.param_groups)

    def _check_added(self, group: Group) -> None:
        check_hyperparameters(group)
        if not self._joined:
            return
        known = {id(parameter) for parameter in self._model.parameters}
        if any(id(parameter) not in known for parameter in group["params"]):
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
            self._call(self._stepper.forget)
        super().zero_grad(set_to_none)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return residuals, hyper-parameters, and which push of which incarnation they belong to.

        A push that is still in doubt is part of the residuals returned: if it turns out to have been applied, they are
        recognised as out of date when they are loaded.
        """
        return self._call(self._state_dict)

    def _state_dict(self) -> dict[str, Any]:
        try:
            self._stepper.drain()
        except ServerUnreachableError as error:
            log.warning("saving the state with a push in doubt: %s", error)
        state = state_as_refused(self.state, self._push_pull, super().state_dict)
        state["psclient"] = PushMark.now(self.name, self._membership, self._push_pull).plain()
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
            self._require_open()
        mark, plain = split(state_dict, self.name)
        if mark is None:
            plain = self._from_torch(plain)
        self._call(self._stepper.rest)  # a push that is applied later would count beside what is loaded
        super().load_state_dict(plain)
        self._assign_groups()
        self._compressor.memories = self.state  # torch has put a new dict in the place of the old one
        restore_memories(self, plain)
        if mark is None:
            return
        now = PushMark.now(self.name, self._membership, self._push_pull)
        if self.server_remembers and mark.run != now.run and now.version < mark.version:
            log.warning(
                "this state is of version %d of run %s, and run %s is at version %d: moments and schedule of the "
                "server's optimizer begin anew. The server keeps them: through restarts with psservice serve "
                "--data-dir DIR, and another run begins with them by --init DIR",
                mark.version,
                mark.run,
                now.run,
                now.version,
            )
        if mark.worker != now.worker:
            log.warning(
                "this state is of worker %s, and this is worker %s: its residuals are dropped, as that one may send "
                "them too; to go on with them give this worker that name (worker=, PSCLIENT_WORKER)",
                mark.worker,
                now.worker,
            )
            self.state.clear()
        elif stale_residuals(mark, now, self._membership.last_push_record):
            log.warning(
                "this state was saved at step %d of worker %s, and the server has applied a later push: its residuals "
                "were sent since and are dropped; training goes on from the server's parameters",
                mark.acknowledged_step,
                mark.worker,
            )
            self.state.clear()
        self._push_pull.step = max(self._push_pull.step, mark.step)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled: a copy would have no place in the run.

        Raises:
            CopyRefusedError: always.
        """
        raise CopyRefusedError(type(self).__name__)

    # Inner parts

    def _from_torch(self, state: dict[str, Any]) -> dict[str, Any]:
        return from_sgd(state, self.param_groups, self.name, keeps_momentum=self.momentum_is_torchs)

    def _assign_groups(self) -> None:
        self._groups.assign(self.param_groups)

    def _run(self, work: Callable[[], Result]) -> Result:
        """Run work of the training loop in the optimizer's own thread, and wait for it."""
        self._require_open()
        return self._call(work, self._membership.seconds_left)

    def _call(self, work: Callable[[], Result], seconds: float | None = None) -> Result:
        """Run work in the optimizer's own thread, on this thread's CUDA stream, and wait for it.

        A signal's exception ends the wait and not the work: calls to servers are cut short, and the rest goes on to a
        point from which the next call can continue.

        Raises:
            ServerUnreachableError: it has not ended within ``seconds``.
        """
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

        def body() -> Result:
            with torch.no_grad(), torch.cuda.stream(stream):
                return work()

        if self._lifecycle.ended or self._lifecycle.in_child:  # no server is called there, and the thread is not
            return body()
        try:
            return self._thread.call(body, self._cluster.cancel_unawaited, seconds)
        except TimeoutError:  # only an end has a time limit
            address, hint = self._membership.coordinator.address, "What it had not pushed is lost with this worker"
            raise ServerUnreachableError(address, seconds or 0.0, "its time is over", hint) from None

    def _require_own_gradients(self) -> None:
        """Refuse averaged gradients and shared parameters at the first step: a script may wrap or share late."""
        if not self.gradients_are_its_own:
            refuse_averaged(self._model.parameters)
            self._model.refuse_shared()
            self.gradients_are_its_own = True

    def _require_open(self) -> None:
        if self._lifecycle.in_child:
            raise ConfigurationError("this process was forked from the optimizer's; make an optimizer of its own here")
        if self._lifecycle.ended:
            raise ConfigurationError("this optimizer has left its run (close()); make a new one to go on")


def _unknown_arguments(kind: type[ParameterServerOptimizer], unknown: Iterable[str]) -> str:
    """Return what is said of arguments that a method does not have."""
    first = next(iter(unknown))
    known = {name for each in (kind, ParameterServerOptimizer) for name in inspect.signature(each).parameters}
    near = difflib.get_close_matches(first, known - {"connection", "unknown", "defaults"}, 1)
    return f"{kind.__name__} has no argument {first!r}; " + (f"did you mean {near[0]!r}?" if near else "see its docs")
