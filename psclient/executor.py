"""Threads that run jobs in order, and waiting for a job that any signal may interrupt.

A thread that works for another one launches in that thread's CUDA streams.
"""

import _thread
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

import torch

from psclient.errors import ConfigurationError
from pscore.telemetry import tracing

Result = TypeVar("Result")

_INTERRUPTED_SECONDS = 2.0  # how long an interrupted caller waits for the end of the work that was cancelled
_TURN_SECONDS = 0.5  # a signal that comes just before a lock is waited for is heard only after that

_here = threading.local()


class Job(Generic[Result]):
    """Work for another thread, and its end.

    Not a :class:`concurrent.futures.Future`: an exception that a signal raises inside its ``Condition`` leaves that
    locked for ever. Here the waiting thread owns no lock at any moment.

    The work has the tracing context of the thread that makes the job. A caller that stops waiting sets
    ``cancelled``; the job and its parts are then skipped if they have not begun.
    """

    def __init__(self, work: Callable[[], Result], parent: "Job[Any] | None" = None) -> None:
        self.finished = False
        self.cancelled = False
        self._parent = parent
        self._work: Callable[[], Result] | None = work if tracing.spans is None else tracing.carried(work)
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._running = _thread.allocate_lock()
        self._running.acquire()

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for this job, or for the one that it is a part of."""
        return self.cancelled or (self._parent is not None and self._parent.is_cancelled)

    def run(self) -> None:
        """Do the work, once."""
        if self.finished:
            return
        work, self._work = self._work, None
        _here.job = self
        try:
            if work is not None and not self.cancelled:  # a part of a cancelled job ends as the job itself does
                self._result = work()
        except BaseException as error:
            self._error = error
        _here.job = None
        running = self._running
        self.finished = True
        del self  # an error's traceback refers to this frame: only a collector would end that circle
        running.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end, no longer than ``seconds``; return whether it has come."""
        end = math.inf if seconds is None else time.monotonic() + seconds
        while not self.finished:
            left = end - time.monotonic()
            if self._running.acquire(timeout=min(max(0.0, left), _TURN_SECONDS)):
                self._running.release()
            elif left <= _TURN_SECONDS:
                break
        return self.finished

    def exception(self, seconds: float | None = None) -> BaseException | None:
        """Wait for the end and return the work's error; :class:`TimeoutError` after ``seconds``."""
        if not self.wait(seconds):
            raise TimeoutError
        return self._error

    def result(self, seconds: float | None = None) -> Result:
        """Wait for the end and return the result, or raise the work's error; :class:`TimeoutError` after a time."""
        error = self.exception(seconds)
        if error is None:
            return self._result  # type: ignore[return-value]
        try:
            raise error
        finally:
            del error, self  # likewise


def current() -> Job[Any] | None:
    """Return the job that the calling thread runs; ``None`` outside of a :class:`SerialExecutor`."""
    return getattr(_here, "job", None)


def is_cancelled() -> bool:
    """Return whether nobody waits any longer for what the calling thread does."""
    job = current()
    return job is not None and job.is_cancelled


class SerialExecutor:
    """Runs jobs one after another, beside the thread that submits them.

    A daemon thread, unlike those of :mod:`concurrent.futures`: the end of a program must not wait for a server.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._running: list[Job[Any]] = []  # one, or none; apart from this object, which the thread must not keep alive
        self._thread = threading.Thread(target=_run, args=(self._jobs, self._running), name=name, daemon=True)
        self._thread.start()
        # An executor that is dropped without being closed leaves no thread behind; at exit it must still work.
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def submit(self, work: Callable[[], Result], *, as_part: bool = False) -> Job[Result]:
        """Run a job after those before it; ``as_part`` of the calling thread's, it is cancelled with that."""
        job = Job(work, current() if as_part else None)
        self._jobs.put(job)
        return job

    def call(
        self, work: Callable[[], Result], cancel_calls: Callable[[], object], seconds: float | None = None
    ) -> Result:
        """Run a job after those before it and wait for it; in the thread itself, run it at once.

        If the wait ends early, by a signal's exception or by :class:`TimeoutError` after ``seconds``, this job is
        cancelled, and the job that it may still wait for. ``cancel_calls`` ends their calls to servers; the wait then
        goes on until the job has ended, for two seconds at most.
        """
        if threading.get_ident() == self._thread.ident:
            return work()
        job = Job(work)
        try:
            self._jobs.put(job)
            if not job.wait(seconds):
                raise TimeoutError
        except BaseException:
            job.cancelled = True
            self._jobs.put(job)  # it may not have been; none is run twice
            self.cancel()
            cancel_calls()
            job.wait(_INTERRUPTED_SECONDS)
            raise
        try:
            return job.result()
        finally:
            del job, work  # likewise

    def cancel(self) -> None:
        """Cancel the job that is under way, if one is."""
        for job in [*self._running]:
            job.cancelled = True

    def close(self, seconds: float) -> None:
        """Stop after what has been submitted, waiting for it no longer than this."""
        self._jobs.put(None)
        self._thread.join(seconds)


def _run(jobs: "queue.SimpleQueue[Job[Any] | None]", running: list[Job[Any]]) -> None:
    while (job := jobs.get()) is not None:
        running.append(job)
        job.run()
        running.clear()
        del job  # or the thread keeps what it refers to until the next one


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """Return the CUDA devices that tensors lie on."""
    return [device for device in dict.fromkeys(tensor.device for tensor in tensors) if device.type == "cuda"]


def current_streams(devices: Sequence[torch.device]) -> list[torch.cuda.Stream]:
    """Return the calling thread's streams of some devices, and last that of its current device.

    Raises:
        ConfigurationError: a CUDA graph is being captured.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    if torch.cuda.is_current_stream_capturing():
        raise ConfigurationError(
            "a CUDA graph cannot contain a push or a pull: these wait for a server. Capture forward and backward "
            "without step(), with overlap=False, and call step() after each replay of the graph"
        )
    return [torch.cuda.current_stream(device) for device in (*devices, None)]


@contextmanager
def entered(streams: Iterable[torch.cuda.Stream]) -> Iterator[None]:
    """Launch in these streams, one a device; the last one's device is the current one."""
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        yield
