"""A lane's threads: one takes the jobs as long as they are short, and others join it when jobs wait."""

import asyncio
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

_Signal: TypeAlias = "SimpleQueue[bool]"
"""What an idle thread waits for: ``True`` to look for jobs, ``False`` to end."""

_PATIENCE_SECONDS = 5e-3
"""Within which a thread must take a job if jobs wait, for each thread at work; longer than a job of some kilobytes."""


class Pool:
    """Up to ``threads`` threads, which begin when jobs need them.

    Threads that do short jobs side by side compete for Python's lock, and move what they share from core to core. Long
    jobs run without that lock, or wait for a disk. So a job wakes a thread if none is at work; else it waits for those
    that are, and another thread joins n of them if they have taken none for n times 5 ms. The thread that has
    been idle for the shortest time is woken first, and wakes no other.

    torch computes in each of these threads alone: otherwise each would bring a team of OpenMP's.
    Without threads in ``environment`` a job runs in the thread of its caller.

    Attributes:
        at_work: the lane's requests that are at work or wait for a thread; kept by the caller.
    """

    def __init__(self, lane: Lane, threads: int, environment: Environment) -> None:
        self._name, self._most, self._environment = f"rpc-{lane.value}", threads, environment
        self._threads: list[tuple[threading.Thread, _Signal]] = []
        self._lock = threading.Lock()  # of the next three
        self._idle: list[_Signal] = []  # of idle threads, the one that has just ended a job last
        self._backlog: deque[_Entry] = deque()
        self._taken = 0  # jobs so far
        self._taken_before: int | None = None  # when the backlog was last looked at; None if nobody will look again
        self.at_work = 0

    def submit(self, job: Callable[[], Result]) -> "Future[Result]":
        """Queue a job, and return its future; always called on the same event loop, and not after :meth:`close`."""
        future: Future[Result] = Future()
        if not self._environment.is_threaded:
            run_into(future, job)
            return future
        with self._lock:
            self._backlog.append((tracing.carried(job), future))
            none_at_work = len(self._idle) == len(self._threads)
        if none_at_work:
            self._wake_one()
        elif self._taken_before is None:
            self._look_later(asyncio.get_running_loop())
        return future

    def close(self) -> None:
        """Finish the backlog, and end the threads."""
        for _, signal in self._threads:
            signal.put(False)
        for thread, _ in self._threads:
            thread.join()

    def _wake_one(self) -> None:
        """Wake an idle thread, or begin one, as far as there are."""
        with self._lock:
            signal = self._idle.pop() if self._idle else None
        if signal is None and len(self._threads) < self._most:
            signal = SimpleQueue()
            thread = self._environment.start(partial(self._work, signal), f"{self._name}_{len(self._threads)}")
            assert thread is not None
            self._threads.append((thread, signal))
        if signal is not None:
            signal.put(True)

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._taken_before = self._taken
        loop.call_later(_PATIENCE_SECONDS * (len(self._threads) - len(self._idle)), self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have another thread join those at work if jobs wait and none was taken since the last look."""
        if not self._backlog:
            self._taken_before = None
            return
        if self._taken == self._taken_before:
            self._wake_one()
        self._look_later(loop)

    def _work(self, signal: "_Signal") -> None:
        torch.set_num_threads(1)
        while signal.get():
            while (entry := self._next(signal)) is not None:
                job, future = entry
                run_into(future, job)
                del entry, job, future  # or the thread keeps what they refer to until the next job

    def _next(self, signal: "_Signal") -> "_Entry | None":
        """Return a job that waits; ``None`` if the thread is idle."""
        with self._lock:
            if self._backlog:
                self._taken += 1
                return self._backlog.popleft()
            self._idle.append(signal)
            return None
