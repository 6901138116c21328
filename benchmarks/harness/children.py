"""Child processes that run one function each and talk over a pipe, every wait with a time limit.

They are forked from a server process that has imported torch and the library once: a process is there in milliseconds.
"""

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["benchmarks.peers.peers"])
_END_SECONDS = 10.0


class ChildFailedError(Exception):
    """A child failed, or did not answer in time; the message says which and why."""


class Child:
    """A process that runs ``work(connection, *arguments)``; a context manager that ends it.

    Args:
        name: for messages.
        work: a function at the top of a module.
        *arguments: what can be pickled.
    """

    def __init__(self, name: str, work: Callable[..., None], *arguments: Any) -> None:
        self.name = name
        self._connection, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_run, args=(theirs, work, arguments), name=name, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def tell(self, what: Any = None) -> None:
        try:
            self._connection.send(what)
        except OSError as error:
            raise ChildFailedError(f"{self.name} has ended") from error

    def hear(self, seconds: float) -> Any:
        """Receive something; raises :class:`ChildFailedError` where it failed or the time is over."""
        if not self._connection.poll(seconds):
            raise ChildFailedError(f"{self.name} did not answer in {seconds:.0f} s")
        try:
            heard = self._connection.recv()
        except EOFError:
            raise ChildFailedError(f"{self.name} ended without a word") from None
        if isinstance(heard, _Failure):
            raise ChildFailedError(f"{self.name}: {heard.message}")
        return heard

    def wait_for_end(self, seconds: float) -> None:
        """Wait until the process has ended by itself, however; raises :class:`ChildFailedError` at the limit."""
        self._process.join(seconds)
        if self._process.is_alive():
            raise ChildFailedError(f"{self.name} did not end in {seconds:.0f} s")

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let it end, or kill it where something went wrong or it does not."""
        if error is None:
            self._process.join(_END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._connection.close()


def begin(children: Sequence[Child], seconds: float) -> None:
    """Hear from each that it is ready, within so many seconds; then tell all to begin."""
    for child in children:
        child.hear(seconds)
    for child in children:
        child.tell()


class _Failure:
    """What a child says when it fails."""

    def __init__(self, error: BaseException) -> None:
        self.message = "".join(traceback.format_exception_only(error)).strip()


def _run(connection: Connection, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends its children
    torch.set_num_threads(1)
    try:
        work(connection, *arguments)
    except BaseException as error:
        connection.send(_Failure(error))
        raise
