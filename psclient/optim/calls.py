"""How the calls of a training loop reach the optimizer's own thread, and how the last of them ends a worker."""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from psclient.engine.executor import SerialExecutor
from psclient.engine.lifecycle import Lifecycle
from psclient.engine.step import CLOSING_SECONDS
from psclient.errors import ConfigurationError, ServerUnreachableError, SparsepsError
from psclient.rpc.cluster import Cluster
from psclient.rpc.membership import Membership

log = logging.getLogger("psclient")

Result = TypeVar("Result")

_LEAVING_SECONDS = 5.0  # for calls whose answers are of no consequence, and threads that end


class Calls:
    """Runs a worker's work in ``thread``, one call at a time, and waits for the end of each."""

    def __init__(self, thread: SerialExecutor, lifecycle: Lifecycle, membership: Membership, cluster: Cluster) -> None:
        self._thread, self._lifecycle, self._membership, self._cluster = thread, lifecycle, membership, cluster

    def require_open(self) -> None:
        """Raise :class:`ConfigurationError` where the optimizer has left its run, or belongs to another process."""
        if self._lifecycle.in_child:
            raise ConfigurationError("this process was forked from the optimizer's; make an optimizer of its own here")
        if self._lifecycle.ended:
            raise ConfigurationError("this optimizer has left its run (close()); make a new one to go on")

    def run(self, work: Callable[[], Result]) -> Result:
        """Do work that needs a worker with a place in its run."""
        self.require_open()
        return self.always(work, self._membership.seconds_left)

    def always(self, work: Callable[[], Result], seconds: float | None = None) -> Result:
        """Do work, on the CUDA stream of the calling thread; after the end, in the calling thread itself.

        A signal's exception ends the wait and not the work: calls to servers are cut short, and the rest goes on to a
        point from which the next call can continue.

        Raises:
            ServerUnreachableError: the work has not ended within ``seconds``; only an end has such a limit.
        """
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

        def body() -> Result:
            with torch.no_grad(), torch.cuda.stream(stream):
                return work()

        if self._lifecycle.ended or self._lifecycle.in_child:
            return body()
        try:
            return self._thread.call(body, self._cluster.cut, seconds)
        except TimeoutError as error:
            if isinstance(error, SparsepsError):
                raise
            address, hint = self._membership.coordinator.address, "What it had not pushed is lost with this worker"
            raise ServerUnreachableError(address, seconds or 0.0, "its time is over", hint) from None

    def close(self, leave: Callable[[], None]) -> None:
        """End the worker with ``leave``; harmless twice."""
        if self._lifecycle.ended or self._lifecycle.in_child:
            return
        self._membership.hurry(CLOSING_SECONDS)
        self._thread.cancel()  # only what nobody waits for can be under way: the last call was interrupted
        self._cluster.cut()
        leaving = self._thread.submit(torch.no_grad()(leave))  # goes on where the wait is interrupted
        self._lifecycle.ended = True
        try:
            leaving.result(CLOSING_SECONDS + _LEAVING_SECONDS)
            self._thread.close(_LEAVING_SECONDS)
        except TimeoutError:
            worker = self._membership.identity.worker_id
            log.warning("worker %s could not leave in time; its lease ends by itself", worker)
        finally:
            self._lifecycle.release()
