"""One worker of a run: its parts, the thread that they work in, and its end."""

import atexit
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar

import torch

from psclient import settings as client_settings
from psclient.compress.groups import ParamGroups
from psclient.compress.method import Method, State
from psclient.compress.selector import Grouping, Selector
from psclient.compress.table import Choice
from psclient.engine import neighbours, sigterm
from psclient.engine.engine import CLOSING_SECONDS
from psclient.engine.mgs import LayerDensity, MergedGradients
from psclient.engine.streams import current_streams, devices_of, entered
from psclient.errors import ConfigurationError, FingerprintMismatchError, ServerUnreachableError, SparsepsError
from psclient.executor import SerialExecutor
from psclient.model.module import TrainedModel
from psclient.model.replica import Replica
from psclient.rpc.lease_thread import LeaseThread
from psclient.rpc.local_server import LocalServer, start_alone
from psclient.rpc.resolver import connect
from psclient.rpc.run import Run
from psclient.rpc.shard_stream import ShardStream
from psclient.settings import ClientSettings
from pscore import jit
from pscore.model.layout import ModelLayout
from pscore.net import forks
from pscore.selection import SELECTORS
from pscore.telemetry import tracing
from pscore.telemetry.span import TracingError
from pscore.wire.errors import ErrorCode

log = logging.getLogger("psclient")

Result = TypeVar("Result")

_ONE_SERVER_ONE_MODEL = (
    "another optimizer of this process trains another model there: give each model a server of its own, or make one "
    "optimizer of both, with model=torch.nn.ModuleDict(...) (docs/guide/training.md, Several models)"
)
_LEAVING_SECONDS = 5.0  # for calls whose answers are of no consequence, and threads that end
_GRACE_SECONDS = 20.0  # for the flush on SIGTERM; below Kubernetes' default grace period of 30 s


class _Stoppable(Protocol):
    """The part of an optimizer that ends."""

    @property
    def worker(self) -> str: ...

    @property
    def _joined(self) -> bool: ...

    @property
    def _has_forgotten_model(self) -> bool: ...

    def _hurry(self, seconds: float) -> None: ...

    def _flush_on_exit(self) -> None: ...

    def close(self) -> None: ...


class Worker:
    """Makes a worker's parts, runs its work in a thread of its own, and ends it.

    No call of gRPC is made in the program's thread: a signal's exception inside one leaves its locks taken.
    ``memories`` is each parameter's, as the method has it; ``agreed`` are the settings in which all workers of the run
    must agree; ``layer_density`` gives each layer a density of its own.
    """

    lifecycle: "Lifecycle"

    def __init__(
        self,
        method: Method,
        model: TrainedModel,
        groups: ParamGroups,
        memories: MutableMapping[torch.Tensor, State],
        agreed: Mapping[str, str],
        settings: ClientSettings,
        layer_density: LayerDensity | None,
    ) -> None:
        if forks.is_child_of_user():
            raise ConfigurationError(forks.REFUSED)
        client_settings.require_server(settings)
        self._name, self._is_ahead = client_settings.worker_name(settings), False
        self._before_ahead: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters, each with its own values
        self._devices = devices_of(model.parameters)
        self._own_server = start_alone() if settings.server == client_settings.LOCAL else None
        self.server = settings.server if self._own_server is None else self._own_server.server
        trained = {id(parameter) for parameter in model.parameters if parameter in groups}
        layout = model.layout
        is_named = bool(settings.worker)
        self.claim = neighbours.Claim(self.server, {self.server}, self._name, is_named, layout.fingerprint, trained)
        self._thread = SerialExecutor("psclient-step")
        try:
            neighbours.predecessors(self.claim)  # raises, before anything is waited for
            with sigterm.beginning(enabled=settings.flush_on_sigterm):
                shards = self._thread.call(partial(self._reach, settings, model.layout), lambda: None)
            self._predecessors = neighbours.predecessors(self.claim)
        except BaseException:
            if self._own_server is not None:
                self._own_server.stop()
            raise
        replica = Replica(model.layout, model.parameters)
        way = weakref.WeakMethod(self._make_way)  # open streams refer to the run, and must not keep the worker alive
        self.run = Run(
            shards,
            self._name,
            replica,
            model.buffers,
            method.name,
            agreed,
            settings,
            lambda: (make_way := way()) is not None and make_way(),
        )
        self.grouping = Grouping(model.layout, settings.bucket_bytes)
        self.merged: MergedGradients | None = None
        if (merges := settings.merge == "mgs") or layer_density is not None:
            self.merged = MergedGradients(model.layout, self.grouping, layer_density, merges=merges)
        dense_below = model.layout.whole_below(settings.dense_below)
        choice = Choice(SELECTORS[settings.selector], dense_below)
        self.selector = Selector(method, model, memories, groups, choice, self.grouping)

    def _make_way(self) -> bool:
        """End an earlier optimizer that has this worker's name; return whether there was one."""
        before = len(self._predecessors)
        self._end_predecessors([name for name, _ in self._predecessors if name == self._name])
        return len(self._predecessors) < before

    def _end_predecessors(self, names: Sequence[str]) -> None:
        """End the earlier optimizers of these names, whose place this one takes: the run lets it in."""
        ended = [each for each in self._predecessors if each[0] in names]
        self._predecessors = [each for each in self._predecessors if each[0] not in names]
        for name, optimizer in ended:
            what = "is worker" if name == self._name else "trains the same model, as worker"
            log.warning("an earlier optimizer of this process %s %s; it leaves for the new one", what, name)
            optimizer.close()

    def _reach(self, settings: ClientSettings, layout: ModelLayout) -> list[ShardStream]:
        jit.announce = log.warning
        if settings.tracing:
            try:
                tracing.start("psclient", self._name)
            except TracingError as error:
                raise ConfigurationError(str(error)) from error
        connections = connect(self.server, settings.security, settings.connect_seconds)
        self.claim.places |= connections[0].places()
        self._has_neighbour = neighbours.is_near(self.claim)
        spans = layout.shard_spans(len(connections))
        return [ShardStream(connections[i], i, span, settings) for i, span in enumerate(spans)]

    def watch(self, optimizer: _Stoppable, abandon: Callable[[], None], *, flush_on_sigterm: bool) -> None:
        """End ``optimizer`` in order from now on; ``abandon`` ends the worker of a collected one."""
        leases = self.run.leases
        self.lifecycle = Lifecycle(optimizer, self._own_server, leases, abandon, flush_on_sigterm=flush_on_sigterm)

    def join(self) -> None:
        """Join the run."""
        neighbours.add(self.claim, self.lifecycle)
        try:
            self.do(self.run.join)
            self._end_predecessors([name for name, _ in self._predecessors])
        except FingerprintMismatchError as error:
            if not self._has_neighbour:
                raise
            text = str(error).replace(ErrorCode.FINGERPRINT_MISMATCH.advice, _ONE_SERVER_ONE_MODEL)
            raise FingerprintMismatchError(text, error.tensor) from None
        finally:
            self._predecessors = []

    def require_open(self) -> None:
        """Raise :class:`ConfigurationError` if the optimizer has left its run, or belongs to another process."""
        if self.lifecycle.in_child:
            raise ConfigurationError(forks.REFUSED)
        if self.lifecycle.ended:
            raise ConfigurationError("this optimizer has left its run (close()); make a new one to go on")
        if self._is_ahead:
            raise ConfigurationError("the parameters are others inside lookahead(): leave its body before this call")

    @contextmanager
    def looking_ahead(self) -> Iterator[None]:
        """Refuse all work in the body, if the parameters lack what the residuals would send."""
        self.require_open()
        try:
            self.always(self._look_ahead)
            self._is_ahead = True
            yield
        finally:
            self.end_lookahead()

    def end_lookahead(self) -> None:
        """Give the parameters the bits that they had before the body, if one has begun."""
        self._is_ahead = False
        self.always(self._look_back)

    def _look_ahead(self) -> None:
        for each in self.selector.take_off_unsent():
            self._before_ahead.append(each)

    def _look_back(self) -> None:
        while self._before_ahead:
            memory, values = self._before_ahead[-1]
            memory.copy_(values)
            self._before_ahead.pop()

    def do(self, work: Callable[[], Result]) -> Result:
        """Do work that needs a worker that has joined and not left."""
        self.require_open()
        self.lifecycle.follow_sigterm()
        return self.always(work, self.run.seconds_left)

    def always(self, work: Callable[[], Result], seconds: float | None = None) -> Result:
        """Do work, on the CUDA streams of the calling thread; after the end, in the calling thread itself.

        On an interrupt, calls to servers are cancelled and local work finishes, so the next call can continue.
        ``seconds`` is set only while closing.
        """
        streams = current_streams(self._devices)

        def body() -> Result:
            with torch.no_grad(), entered(streams):
                if not self._is_ahead:
                    self._look_back()  # what an interrupt has left
                return work()

        if not self.lifecycle.alive:
            return body()
        try:
            return self._thread.call(body, self.run.cancel_unawaited, seconds)
        except TimeoutError as error:
            if isinstance(error, SparsepsError):
                raise
            address, hint = self.run.coordinator.address, "What it had not pushed is lost with this worker"
            raise ServerUnreachableError(address, seconds or 0.0, "its time is over", hint) from None

    def close(self, leave: Callable[[], None]) -> None:
        """End the worker with ``leave``; harmless twice."""
        if not self.lifecycle.alive:
            return
        self.run.set_deadline(CLOSING_SECONDS)
        self._thread.cancel()  # only what nobody waits for can be under way: the last call was interrupted
        self.run.cancel_unawaited()
        leaving = self._thread.submit(torch.no_grad()(leave))  # goes on if the wait is interrupted
        self.lifecycle.ended = True
        try:
            leaving.result(CLOSING_SECONDS + _LEAVING_SECONDS)
            self._thread.close(_LEAVING_SECONDS)
        except TimeoutError:
            log.warning("worker %s could not leave in time; its lease ends by itself", self._name)
        finally:
            self.lifecycle.release()


class Lifecycle:
    """Ends an optimizer in order: at exit, on SIGTERM, when it is collected, and never in a forked child.

    On SIGTERM (:mod:`psclient.engine.sigterm`) a step that is under way is ended first: the step runs in a thread of
    its own, and what SIGTERM asks for follows it there.

    An optimizer that is collected without having been closed leaves too, by ``leave``, which must not refer to the
    optimizer: in the thread that kept its leases, because a finalizer must not wait.
    """

    def __init__(
        self,
        optimizer: _Stoppable,
        own_server: LocalServer | None,
        leases: LeaseThread,
        leave: Callable[[], None],
        *,
        flush_on_sigterm: bool,
    ) -> None:
        self.ended = False
        self.optimizer = weakref.ref(optimizer)
        self._own_server, self._leases = own_server, leases
        self._owner = os.getpid()
        self._flushes_on_sigterm = flush_on_sigterm
        self._kept: _Stoppable | None = None
        if flush_on_sigterm:
            sigterm.add(self)
        atexit.register(self._at_exit)
        self._finalizer = weakref.finalize(optimizer, self._on_collected, leave)
        self._finalizer.atexit = False  # _at_exit closes what is still there

    def owner(self) -> _Stoppable | None:
        """Return the optimizer, if it was not collected."""
        return self.optimizer()

    @property
    def in_child(self) -> bool:
        """True in a process forked from the one that made the optimizer: nothing here is the child's to end."""
        return os.getpid() != self._owner

    @property
    def alive(self) -> bool:
        """Whether this process's worker has not left."""
        return not self.ended and not self.in_child

    def release(self) -> None:
        """Undo the registrations, and stop the embedded server; in any thread."""
        self._finalizer.detach()
        self._release()

    def follow_sigterm(self) -> None:
        """Hear of SIGTERM also if the script has set a handler since."""
        if self._flushes_on_sigterm:
            sigterm.follow()

    def expect_end(self) -> None:
        """Have :meth:`push_expected` push, and keep the optimizer until then: the script goes on after a SIGTERM."""
        if self.alive:
            self._kept = self.optimizer()

    def push_expected(self) -> None:
        """Push what is held, if SIGTERM came before this end."""
        if self._kept is not None:
            self.push_held(leaves=False)

    def push_held(self, *, leaves: bool) -> None:
        """Push what is held, in any thread, and leave if ``leaves``; raises no error of a server's."""
        optimizer, self._kept = self.optimizer(), None
        if optimizer is None or not optimizer._joined or not self.alive:
            return
        optimizer._hurry(_GRACE_SECONDS)
        try:
            optimizer._flush_on_exit()
            log.warning("SIGTERM: worker %s has pushed what it held%s", optimizer.worker, " and leaves" * leaves)
        except SparsepsError as error:
            log.warning("SIGTERM: worker %s could not push what it held: %s", optimizer.worker, error)
        finally:
            if leaves:
                optimizer.close()

    def _release(self) -> None:
        sigterm.remove(self)
        atexit.unregister(self._at_exit)
        if self._own_server is not None:
            self._own_server.stop()

    def _on_collected(self, leave: Callable[[], None]) -> None:
        """Have the lease thread leave; called by the finalizer, in any thread and at any point of the program."""
        if self.in_child:
            return
        self.ended = True
        sigterm.remove(self)

        def end() -> None:
            try:
                leave()
            finally:
                self._release()

        self._leases.hand_over(end)

    def _at_exit(self) -> None:
        if self.in_child:
            return
        optimizer = self.optimizer()
        if optimizer is not None:
            optimizer.close()
        else:
            self._leases.join(_GRACE_SECONDS)
