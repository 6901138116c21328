"""One thread that runs jobs in the order in which they come."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from pscore import tracing

Result = TypeVar("Result")


class JobThread:
    """Runs jobs one after another, beside the thread that submits them.

    A daemon thread, unlike those of :mod:`concurrent.futures`: the end of a program must not wait for a server.
    """

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()
        # Who drops this without closing it leaves no thread behind; at exit it must still work, so not then.
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def submit(self, job: Callable[[], Result]) -> "Future[Result]":
        """Run a job after those before it."""
        future: Future[Result] = Future()
        self._jobs.put((tracing.carried(job), future))
        return future

    def close(self, seconds: float) -> None:
        """Stop after what has been submitted, waiting for it no longer than this."""
        self._jobs.put(None)
        self._thread.join(seconds)


def _run(jobs: "queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]") -> None:
    while (entry := jobs.get()) is not None:
        job, future = entry
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)
        del entry, job, future  # or the thread keeps what they refer to until the next job
