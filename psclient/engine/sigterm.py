"""SIGTERM: one handler for all workers of a process.

What was there before decides what becomes of the program (docs/guide/training.md, *SIGTERM*):

==================================  =================================================================================
before                              on SIGTERM
==================================  =================================================================================
nothing (``SIG_DFL``)               every worker pushes what it holds and leaves; then the program ends with status 143
a handler of the script's           it is called. If it ends the program, every worker pushes what it holds first.
                                    Else nothing is closed, and each worker pushes what it holds when it is closed
``SIG_IGN``, or a handler from C    not touched
==================================  =================================================================================

A handler that the script sets later is found at the next step.
"""

import _thread
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from psclient.executor import Job

log = logging.getLogger("psclient")


class Terminable(Protocol):
    """A worker of this process, or of the one that it was forked from."""

    @property
    def in_child(self) -> bool:
        """True in a process forked from the worker's."""

    def expect_end(self) -> None:
        """Push what is held once the worker is closed."""

    def push_held(self, *, leaves: bool) -> None:
        """Push what is held, in any thread, and leave if ``leaves``; raises no error of a server's."""


class Handler:
    """The handler; ``before`` is what it has taken the place of: ``SIG_DFL``, or a function of the script's."""

    def __init__(self, before: Callable[[int, FrameType | None], Any] | signal.Handlers) -> None:
        self.before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Do what SIGTERM asks for."""
        workers = [worker for worker in _workers if not worker.in_child]
        if callable(self.before):
            for worker in workers:
                worker.expect_end()
            try:
                self.before(number, frame)
            except SystemExit:
                _push_all(workers, leave=False)
                raise
        elif signal.getsignal(signal.SIGTERM) is not self:  # the script's own has called what was there before it
            for worker in workers:
                worker.expect_end()
        elif workers or _is_beginning_here():
            if _push_all(workers, leave=True):
                # A DataLoader's handler raises if a process of its own has ended: that would take the place of this.
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                raise SystemExit(128 + number)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_workers: list[Terminable] = []
_beginnings: list[int] = []  # ids of the processes in which workers begin
_pushing: list[int] = []  # ids of the processes in which a signal's push is under way


def adopt() -> None:
    """Handle SIGTERM before what handles it now; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGTERM)
    if before is signal.SIG_DFL or (callable(before) and not isinstance(before, Handler)):
        signal.signal(signal.SIGTERM, Handler(before))


def follow() -> None:
    """Handle SIGTERM before a handler that the script has set since; a disposition that it has set stays."""
    handler = signal.getsignal(signal.SIGTERM)
    if callable(handler) and not isinstance(handler, Handler):
        adopt()


def add(worker: Terminable) -> None:
    """Have SIGTERM concern a worker."""
    _workers.append(worker)
    adopt()


def remove(worker: Terminable) -> None:
    """Undo :func:`add`; after the last worker, SIGTERM is handled as before the first, if this is the main thread."""
    if worker in _workers:
        _workers.remove(worker)
        _restore()


@contextmanager
def beginning(*, enabled: bool) -> Iterator[None]:
    """Let SIGTERM end the program in order while a worker looks for its servers, before :func:`add`."""
    if not enabled:
        yield
        return
    _beginnings.append(os.getpid())
    adopt()
    try:
        yield
    finally:
        _beginnings.pop()
        _restore()


def _is_beginning_here() -> bool:
    return os.getpid() in _beginnings


def _restore() -> None:
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    if is_main and not _workers and not _beginnings and isinstance(handler, Handler):
        signal.signal(signal.SIGTERM, handler.before)


def _push_all(workers: Sequence[Terminable], *, leave: bool) -> bool:
    """Have all workers push at once; return whether this call did: a second signal does not break the first one off."""
    if os.getpid() in _pushing:
        return False
    _pushing.append(os.getpid())
    try:
        jobs = [Job(lambda worker=worker: worker.push_held(leaves=leave)) for worker in workers]  # type: ignore[misc]
        _run_through(jobs)
        for error in filter(None, [job.exception() for job in jobs]):
            log.warning("SIGTERM: what a worker held could not be pushed: %r", error)
    finally:
        _pushing.pop()
    return True


def _run_through(jobs: Sequence[Job[None]]) -> None:
    """Run jobs, each in a thread, and wait for their ends, whatever handlers of other signals raise here meanwhile.

    The handler of a ``DataLoader``, say, raises when SIGTERM has ended its workers. Ctrl-C does break the wait off.
    """
    begun = [_thread.allocate_lock() for _ in jobs]
    started: list[int] = []

    def run() -> None:
        for number in range(len(started), len(jobs)):
            _thread.start_new_thread(_run_once, (begun[number], jobs[number]))  # not Thread.start(), which waits
            started.append(number)
        for job in jobs:
            job.wait()

    def guarded(call: Callable[[], None]) -> Callable[[], None]:
        def until_finished() -> None:
            while not all(job.finished for job in jobs):
                try:
                    call()
                except KeyboardInterrupt:
                    raise
                except BaseException as error:
                    log.debug("raised by another signal's handler: %r", error)

        return until_finished

    guarded(guarded(run))()  # twice, for what is raised between two turns of the inner loop


def _run_once(begun: "_thread.LockType", job: Job[None]) -> None:
    if begun.acquire(blocking=False):  # else a start that was interrupted has started it
        job.run()
