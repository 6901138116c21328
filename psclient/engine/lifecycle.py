"""An optimizer's end: at exit, on SIGTERM, when nobody refers to it any more, and never in a forked child."""

import atexit
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Protocol

from psclient.errors import SparsepsError
from psclient.rpc.heartbeat import LeaseThread
from psclient.rpc.local_server import LocalServer

log = logging.getLogger("psclient")

GRACE_SECONDS = 20.0
"""How long a worker that gets SIGTERM tries to flush; below Kubernetes' default grace period of 30 s."""


class Stoppable(Protocol):
    """The part of an optimizer that ends."""

    @property
    def worker(self) -> str:
        """The worker's name."""

    @property
    def joined(self) -> bool:
        """Whether the worker has a place in the run."""

    def hurry(self, seconds: float) -> None:
        """Wait no longer than this for a server from now on."""

    def flush_on_exit(self) -> None:
        """Push what a step has left behind."""

    def close(self) -> None:
        """Leave the run."""


_workers: "weakref.WeakValueDictionary[tuple[str, str], Lifecycle]" = weakref.WeakValueDictionary()
"""Those of this process, by servers and worker's name."""


def has_other(server: str) -> bool:
    """Return whether an optimizer of this process is a worker of these servers."""
    return any(place[0] == server and other.alive for place, other in _workers.items())


def end_earlier(server: str, worker: str) -> None:
    """End the optimizer of this process that is this worker at these servers: a cell was run again, say."""
    earlier = _workers.get((server, worker))
    optimizer = earlier.optimizer() if earlier is not None and earlier.alive else None
    if optimizer is not None:
        log.warning("an earlier optimizer of this process is worker %s too; it leaves for the new one", worker)
        optimizer.close()


class Lifecycle:
    """Ends an optimizer in order.

    On SIGTERM the worker flushes its residuals, leaves, and then ends as it would have without this library: by the
    handler that was there before, or with status 143. A step that is under way is ended first: the step runs in a
    thread of its own, and the handler's calls follow it.

    An optimizer that is collected without having been closed leaves too, by ``leave``, which must not refer to the
    optimizer: in the thread that kept its leases, because a finalizer must not wait.
    """

    def __init__(
        self,
        optimizer: Stoppable,
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
        self._previous: signal.Handlers | int | object | None = None
        self._handles_sigterm = flush_on_sigterm and threading.current_thread() is threading.main_thread()
        if self._handles_sigterm:
            self._previous = signal.signal(signal.SIGTERM, self._on_sigterm)
        atexit.register(self._at_exit)
        self._finalizer = weakref.finalize(optimizer, self._on_collected, leave)
        self._finalizer.atexit = False  # _at_exit closes what is still there

    @property
    def in_child(self) -> bool:
        """True in a process forked from the one that made the optimizer: nothing here is the child's to end."""
        return os.getpid() != self._owner

    @property
    def alive(self) -> bool:
        """Whether this process's worker has not left."""
        return not self.ended and not self.in_child

    def take_place(self, server: str, worker: str) -> None:
        """Be known as this worker of these servers in this process."""
        _workers[server, worker] = self

    def release(self) -> None:
        """Undo the registrations, and stop the embedded server."""
        if self.in_child:
            return
        self._finalizer.detach()
        self._restore_handler()
        self._release()

    def _release(self) -> None:
        atexit.unregister(self._at_exit)
        if self._own_server is not None:
            self._own_server.stop()

    def _restore_handler(self) -> None:
        if self._handles_sigterm and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, self._previous)  # type: ignore[arg-type]

    def _on_collected(self, leave: Callable[[], None]) -> None:
        """Have the lease thread leave; called by the finalizer, in any thread and at any point of the program."""
        if self.in_child:
            return
        self.ended = True
        if threading.get_ident() == threading.main_thread().ident:  # elsewhere the handler stays, and passes signals on
            self._restore_handler()

        def end() -> None:
            try:
                leave()
            finally:
                self._release()

        self._leases.hand_over(end)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self.in_child:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        optimizer = self.optimizer()
        if optimizer is not None and optimizer.joined and not self.ended:
            optimizer.hurry(GRACE_SECONDS)
            try:
                optimizer.flush_on_exit()
                log.warning("SIGTERM: worker %s has pushed what it held and leaves", optimizer.worker)
            except SparsepsError as error:
                log.warning("SIGTERM: worker %s could not push what it held: %s", optimizer.worker, error)
            optimizer.close()
        if callable(self._previous):
            self._previous(signal.SIGTERM, None)
            return
        raise SystemExit(128 + signal.SIGTERM)

    def _at_exit(self) -> None:
        optimizer = self.optimizer()
        if self.in_child:
            return
        if optimizer is not None:
            optimizer.close()
        else:
            self._leases.join(GRACE_SECONDS)
