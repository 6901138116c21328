"""The apply thread: the one thread that owns a shard's parameters and runs everything that touches them, in order."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import torch

from pscore.telemetry import tracing
from pscore.wire.errors import ErrorCode, Rejected
from psservice.awaiting import NotYetError
from psservice.storage.environment import MACHINE, Environment

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_TOGETHER_SECONDS = 1e-3
"""After which the outcomes of jobs that follow one another are told although more jobs wait.

Each outcome wakes a thread, which then competes with this one for Python's lock.
"""


class ApplyThread:
    """Runs jobs one at a time in the order of submission; the thread starts at once.

    ``waited`` is called with the seconds that each job has waited. ``on_failure`` is called once, when a change has
    failed half-way, and must not wait: then no job is run any more, and the process is to stop and recover.
    Without threads in ``environment`` a job runs in the thread of its caller.

    Attributes:
        held: whether jobs are refused because the state is replaced; set by a job, reset from any thread.
        failed: whether a change has failed half-way.
    """

    def __init__(
        self,
        waited: Callable[[float], None] = lambda seconds: None,
        on_failure: Callable[[], None] = lambda: None,
        environment: Environment = MACHINE,
    ) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any], float] | None] = queue.SimpleQueue()
        self._waited, self._on_failure = waited, on_failure
        self.failed = self.held = self._closed = False
        self._closing = threading.Lock()
        self._compute_threads = torch.get_num_threads()
        self._thread = environment.start(self._work, "apply-thread")

    def submit(self, job: Callable[[], Result]) -> "Future[Result]":
        """Queue ``job`` and return its future; waits for nothing. Raises :class:`Rejected` if none is run any more.

        What changes or reads the parameters is run by :meth:`run` in the job.
        """
        future: Future[Result] = Future()
        if self._thread is None:
            run_into(future, job)
            return future
        with self._closing:
            self._require_open()
            self._jobs.put((tracing.carried(job, "queue"), future, time.perf_counter()))
        return future

    def run(self, job: Callable[[], Result], *, while_held: bool = False) -> Result:
        """Run ``job`` on the apply thread, at once in another job; return its result or raise its error.

        ``while_held``: also while the model is replaced, which does not concern the job.
        """
        if self._thread is None or threading.current_thread() is self._thread:
            if self.failed or self.held:
                self._require_free(while_held)
            if self._thread is None:
                self._require_open()
            return job()
        return self.submit(partial(self.run, job, while_held=while_held)).result()

    def _require_open(self) -> None:
        self.require_whole()
        if self._closed:
            raise Rejected(ErrorCode.DRAINING, "the server is stopping")

    def _require_free(self, while_held: bool) -> None:
        """Raise :class:`Rejected` while the state is replaced (``BUSY``) or half changed (``DRAINING``)."""
        self.require_whole()
        if self.held and not while_held:
            raise NotYetError(ErrorCode.BUSY, "another model is being installed", lambda: not self.held)

    def require_whole(self) -> None:
        """Raise :class:`Rejected` (``DRAINING``) if a change has failed half-way."""
        if self.failed:
            raise Rejected(
                ErrorCode.DRAINING, "an update failed half-way; the shard stops, and recovers when it starts"
            )

    def fail(self, error: BaseException) -> None:
        """Run no job any more, because a change has failed half-way; raises :class:`Rejected` (``DRAINING``)."""
        first, self.failed = not self.failed, True
        if first:
            log.critical(
                "an update failed half-way: the shard stops; started again, it recovers from its data directory",
                exc_info=error,
            )
            self._on_failure()
        self.require_whole()

    def close(self) -> None:
        """Finish the queue and stop the thread; later jobs are refused."""
        with self._closing:
            self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _work(self) -> None:
        torch.set_num_threads(self._compute_threads)  # whatever the first thread that computed has set for later ones
        outcomes: deque[Callable[[], None]] = deque()
        first_began = 0.0
        while (entry := self._jobs.get()) is not None:
            job, future, submitted = entry
            began = time.perf_counter()
            self._waited(began - submitted)
            first_began = first_began if outcomes else began
            outcomes.append(_outcome(future, job))
            del entry, job, future  # or the thread keeps what they refer to until the next job
            if self._jobs.empty() or time.perf_counter() > first_began + _TOGETHER_SECONDS:
                _tell(outcomes)
        _tell(outcomes)


def run_into(future: "Future[Any]", job: Callable[[], Any]) -> None:
    """Run a job here, and leave its result or its error in a future."""
    _outcome(future, job)()


def _outcome(future: "Future[Any]", job: Callable[[], Any]) -> Callable[[], None]:
    """Run a job here; return what leaves its result or its error in a future."""
    try:
        return partial(future.set_result, job())
    except BaseException as error:
        return partial(future.set_exception, error)


def _tell(outcomes: deque[Callable[[], None]]) -> None:
    while outcomes:
        outcomes.popleft()()
