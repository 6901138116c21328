"""A lane's threads. A job goes to the thread that has been idle for the shortest time, and wakes no other."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

import torch

from pscore.telemetry import tracing
from psservice.apply_thread import run_into
from psservice.rpc.calls import Lane
from psservice.storage.environment import Environment

Result = TypeVar("Result")

_Entry: TypeAlias = "tuple[Callable[[], Any], Future[Any]]"
_Queue: TypeAlias = "SimpleQueue[_Entry | None]"


class Pool:
    """Up to ``threads`` threads, which begin when jobs need them.

    Each thread waits at a queue of its own. Threads that share one queue, as those of ``ThreadPoolExecutor`` do, wake
    each other: whoever takes a job wakes the next one, which finds nothing, and each needs Python's lock for that.
    torch computes in each of these threads alone: otherwise each would bring a team of OpenMP's threads.
    Without threads in ``environment`` a job runs in the thread of its caller.

    Attributes:
        at_work: the lane's requests that are at work or wait for a thread; kept by the caller.
    """

    def __init__(self, lane: Lane, threads: int, environment: Environment) -> None:
        self._name, self._most, self._environment = f"rpc-{lane.value}", threads, environment
        self._threads: list[tuple[threading.Thread, _Queue]] = []
        self._lock = threading.Lock()  # of the next two
        self._idle: list[_Queue] = []  # of idle threads, the one that has just ended a job last
        self._backlog: deque[_Entry] = deque()
        self.at_work = 0

    def submit(self, job: Callable[[], Result]) -> "Future[Result]":
        """Queue a job, and return its future; always called by the same thread, and not after :meth:`close`."""
        future: Future[Result] = Future()
        if not self._environment.is_threaded:
            run_into(future, job)
            return future
        entry = tracing.carried(job), future
        with self._lock:
            queue = self._idle.pop() if self._idle else None
            if queue is None and len(self._threads) == self._most:
                self._backlog.append(entry)
                return future
        if queue is None:
            queue = self._begin()
        queue.put(entry)
        return future

    def close(self) -> None:
        """Finish the backlog, and end the threads."""
        for _, queue in self._threads:
            queue.put(None)
        for thread, _ in self._threads:
            thread.join()

    def _begin(self) -> "_Queue":
        """Begin a thread, and return its queue."""
        queue: _Queue = SimpleQueue()
        thread = self._environment.start(partial(self._work, queue), f"{self._name}_{len(self._threads)}")
        assert thread is not None
        self._threads.append((thread, queue))
        return queue

    def _work(self, queue: "_Queue") -> None:
        torch.set_num_threads(1)
        while (entry := queue.get()) is not None:
            while entry is not None:
                job, future = entry
                run_into(future, job)
                del entry, job, future  # or the thread keeps what they refer to until the next job
                entry = self._next(queue)

    def _next(self, queue: "_Queue") -> "_Entry | None":
        """Return a job that waits; ``None`` if the thread is idle."""
        with self._lock:
            if self._backlog:
                return self._backlog.popleft()
            self._idle.append(queue)
            return None
