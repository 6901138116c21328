"""How a worker begins and ends in its process, beside the other optimizers there.

A new optimizer takes the place of an earlier one, or is forbidden by it. An end is in order: at exit, on SIGTERM, when
the optimizer is collected, and never in a forked child.
"""

import atexit
import gc
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from psclient import settings as client_settings
from psclient.compress.groups import ParamGroups
from psclient.engine import sigterm
from psclient.errors import ConfigurationError, FingerprintMismatchError, SparsepsError
from psclient.executor import SerialExecutor
from psclient.model.module import TrainedModel
from psclient.rpc.lease_thread import LeaseThread
from psclient.rpc.local_server import start_alone
from psclient.rpc.resolver import connect
from psclient.rpc.shard_stream import ShardStream
from psclient.rpc.traced import TracedShardStream
from psclient.settings import ClientSettings
from pscore import jit
from pscore.model.layout import ModelLayout
from pscore.net import forks
from pscore.telemetry import tracing
from pscore.telemetry.span import TracingError
from pscore.wire.errors import ErrorCode

log = logging.getLogger("psclient")

_ONE_SERVER_ONE_MODEL = (
    "another optimizer of this process trains another model there: give each model a server of its own, or make one "
    "optimizer of both, with model=torch.nn.ModuleDict(...) (docs/guide/training.md, Several models)"
)
_GRACE_SECONDS = 20.0  # for the flush on SIGTERM; below Kubernetes' default grace period of 30 s


class Owner(Protocol):
    """The part of an optimizer that ends, and that others of its process concern."""

    @property
    def worker(self) -> str:
        """The worker's name."""

    @property
    def _joined(self) -> bool: ...

    @property
    def _held(self) -> str: ...

    @property
    def _has_forgotten_model(self) -> bool: ...

    def _hurry(self, seconds: float) -> None: ...

    def _flush_on_exit(self) -> None: ...

    def close(self) -> None:
        """Leave the run."""


@dataclass
class Claim:
    """What a worker of this process is: one place in one run, of one model.

    Attributes:
        server: the shards as they were named.
        places: of shard 0: that name, and the addresses that it leads to, since one server may have several names.
        name: the worker's.
        is_named: whether the script or its environment has named the worker, so that it is one of several on purpose.
        fingerprint: of the model's layout.
        trained: the ids of the parameters in the param groups; the optimizer keeps them alive.
    """

    server: str
    places: set[str]
    name: str
    is_named: bool
    fingerprint: bytes
    trained: set[int]


class Lifecycle:
    """Begins a worker, and ends it in order.

    When this is made, the worker has found its servers and has not joined. On SIGTERM (:mod:`psclient.engine.sigterm`)
    a step that is under way is ended first: the step runs in ``thread``, and what SIGTERM asks for follows it there.

    An optimizer that is collected without having been closed leaves too, by ``leave``, which must not refer to the
    optimizer: in the thread that kept its leases, because a finalizer must not wait.

    Attributes:
        name: the worker's.
        server: the shards as they were named.
        shards: a client of each.
        thread: does the worker's work. No call of gRPC is made in the program's thread: a signal's exception inside one
            leaves its locks taken.
        ended: whether the worker has left.
        flushes_on_sigterm: whether SIGTERM pushes what is held.
    """

    def __init__(self, settings: ClientSettings, model: TrainedModel, groups: ParamGroups) -> None:
        if forks.is_child_of_user():
            raise ConfigurationError(forks.REFUSED)
        client_settings.require_server(settings)
        self.name, self.ended = client_settings.worker_name(settings), False
        self._owner, self.flushes_on_sigterm = os.getpid(), settings.flush_on_sigterm
        self._own_server = start_alone() if settings.server == client_settings.LOCAL else None
        self.server = settings.server if self._own_server is None else self._own_server.server
        trained = {id(parameter) for parameter in model.parameters if parameter in groups}
        layout = model.layout
        self.claim = Claim(self.server, {self.server}, self.name, bool(settings.worker), layout.fingerprint, trained)
        self.thread = SerialExecutor("psclient-step")
        self._kept: Owner | None = None
        try:
            _predecessors(self.claim)  # raises, before anything is waited for
            with sigterm.beginning(enabled=self.flushes_on_sigterm):
                self.shards = self.thread.call(partial(self._reach, settings, layout), lambda: None)
            self._earlier = _predecessors(self.claim)
        except BaseException:
            if self._own_server is not None:
                self._own_server.stop()
            raise

    def _reach(self, settings: ClientSettings, layout: ModelLayout) -> list[ShardStream]:
        jit.announce = log.warning
        if settings.tracing:
            try:
                tracing.start("psclient", self.name)
            except TracingError as error:
                raise ConfigurationError(str(error)) from error
        connections = connect(self.server, settings.security, settings.connect_seconds)
        self.claim.places |= connections[0].places()
        self._has_neighbour = any(not each.places.isdisjoint(self.claim.places) for each, _ in _living())
        spans = layout.shard_spans(len(connections))
        stream = TracedShardStream if settings.tracing else ShardStream
        return [stream(connections[i], i, span, settings) for i, span in enumerate(spans)]

    def watch(self, optimizer: Owner, leases: LeaseThread, leave: Callable[[], None]) -> None:
        """End ``optimizer`` in order from now on."""
        self.optimizer = weakref.ref(optimizer)
        self._leases = leases
        if self.flushes_on_sigterm:
            sigterm.add(self)
        atexit.register(self._at_exit)
        self._finalizer = weakref.finalize(optimizer, self._on_collected, leave)
        self._finalizer.atexit = False  # _at_exit closes what is still there

    def begin(self, join: Callable[[], object]) -> None:
        """Join the run, in the place of the earlier optimizers that this one replaces."""
        _claims[:] = [(each, other) for each, other in _claims if (found := other()) is not None and found.alive]
        _claims.append((self.claim, weakref.ref(self)))
        try:
            join()
            self._end_earlier([name for name, _ in self._earlier])
        except FingerprintMismatchError as error:
            if not self._has_neighbour:
                raise
            text = str(error).replace(ErrorCode.FINGERPRINT_MISMATCH.advice, _ONE_SERVER_ONE_MODEL)
            raise FingerprintMismatchError(text, error.tensor) from None
        finally:
            self._earlier = []

    def make_way(self) -> bool:
        """End an earlier optimizer that has this worker's name; return whether there was one."""
        before = len(self._earlier)
        self._end_earlier([name for name, _ in self._earlier if name == self.name])
        return len(self._earlier) < before

    def _end_earlier(self, names: Sequence[str]) -> None:
        """End the earlier optimizers of these names, whose place this one takes: the run lets it in."""
        ended = [each for each in self._earlier if each[0] in names]
        self._earlier = [each for each in self._earlier if each[0] not in names]
        for name, optimizer in ended:
            what = "is worker" if name == self.name else "trains the same model, as worker"
            log.warning("an earlier optimizer of this process %s %s; it leaves for the new one", what, name)
            optimizer.close()

    def require_open(self) -> None:
        """Raise :class:`ConfigurationError` if the optimizer has left its run, or belongs to another process."""
        if self.in_child:
            raise ConfigurationError(forks.REFUSED)
        if self.ended:
            raise ConfigurationError("this optimizer has left its run (close()); make a new one to go on")

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
            log.warning("SIGTERM: worker %s has pushed %s%s", optimizer.worker, optimizer._held, " and leaves" * leaves)
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


_claims: list[tuple[Claim, "weakref.ref[Lifecycle]"]] = []


def _predecessors(claim: Claim) -> list[tuple[str, Owner]]:
    """Return :func:`_earlier_ones`; before a refusal, optimizers that nobody uses any more are collected."""
    with suppress(ConfigurationError):  # whose traceback would keep the other one alive
        return _earlier_ones(claim)
    gc.collect()
    return _earlier_ones(claim)


def _earlier_ones(claim: Claim) -> list[tuple[str, Owner]]:
    """Return the optimizers, each with its worker's name, whose place a new one takes: a cell was run again, say.

    These are over some of the same parameters, or in the same place of the run with a model that is no longer used.

    Raises:
        ConfigurationError: the two would be one model: the earlier one trains another that is in use.
    """
    found = []
    for other, optimizer in _living():
        is_near = not other.places.isdisjoint(claim.places)
        is_same_place = is_near and other.name == claim.name
        is_one_model = is_near and other.fingerprint == claim.fingerprint
        if not other.trained.isdisjoint(claim.trained):
            found.append((other.name, optimizer))
        elif is_same_place or (is_one_model and not claim.is_named):
            if not optimizer._has_forgotten_model:
                raise ConfigurationError(
                    f"worker {other.name} of this process trains another model at {other.server}, and a run trains one "
                    "model: both would become the same one. Make one optimizer of both, with "
                    "model=torch.nn.ModuleDict(...), or give each model its own server (docs/guide/training.md, "
                    "Several models). If both are workers of one run on purpose, name them: worker=. If the other has "
                    "ended, close() it first"
                )
            found.append((other.name, optimizer))
    return found


def _living() -> Sequence[tuple[Claim, Owner]]:
    lives = [(claim, life()) for claim, life in _claims]
    owners = [(claim, life.optimizer()) for claim, life in lives if life is not None and life.alive]
    return [(claim, optimizer) for claim, optimizer in owners if optimizer is not None]
