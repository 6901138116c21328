"""The writer: the one thread that owns a shard's parameters and runs everything that touches them, in order."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from pscore import tracing
from pscore.reasons import Reason, Refusal

Result = TypeVar("Result")

BUSY_RETRY_SECONDS = 0.2


class Writer:
    """Runs jobs one at a time in the order of submission, behind a bounded queue.

    Args:
        queue_limit: jobs that may wait.
        waited: told of each job for how many seconds it has waited.
    """

    def __init__(self, queue_limit: int, waited: Callable[[float], None] = lambda seconds: None) -> None:
        """Start the thread."""
        self._jobs: queue.Queue[tuple[Callable[[], Any], Future[Any], float] | None] = queue.Queue(queue_limit)
        self._waited = waited
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="shard-writer", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Jobs waiting."""
        return self._jobs.qsize()

    def run(self, job: Callable[[], Result]) -> Result:
        """Run ``job`` on the writer thread and return its result, or raise what it raised.

        Raises:
            Refusal: ``BUSY`` where the queue is full, ``DRAINING`` after :meth:`close`.
        """
        future: Future[Result] = Future()
        with self._closing:
            if self._closed:
                raise Refusal(Reason.DRAINING, "the server is stopping")
            try:
                self._jobs.put_nowait((tracing.carried(job, "queue"), future, time.perf_counter()))
            except queue.Full:
                raise Refusal(
                    Reason.BUSY, "too many updates are waiting to be applied", retry_seconds=BUSY_RETRY_SECONDS
                ) from None
        return future.result()

    def close(self) -> None:
        """Finish what is queued and stop the thread; jobs that come later are refused."""
        with self._closing:
            self._closed = True
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, future, submitted = entry
            self._waited(time.perf_counter() - submitted)
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
