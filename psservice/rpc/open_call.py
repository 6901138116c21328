"""A call on the event loop: its waits for its client, and the threads that work on it."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pscore.telemetry.span import NO_SPAN
from pscore.wire.errors import Rejected
from psservice.rpc.calls import Call, Rule
from psservice.rpc.pool import Pool

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class StalledError(Exception):
    """The client has stalled a call for too long, or the server stops."""


class Executor(Protocol):
    """Threads that jobs are handed over to: a lane's, or the one of the parameters."""

    def submit(self, job: Callable[[], Result]) -> "Future[Result]":
        """Queue a job, and return its future."""


@dataclass(slots=True, eq=False)
class OpenCall:
    """The event loop's side of a call. Times are those of the loop's clock.

    A timer that is set anew at every wait would cost more than most waits. So a call has one timer for all waits: when
    it ends, it compares with the wait that goes on then.
    """

    call: Call  # the request that is being served, or was served last
    context: Any
    rule: Rule
    pool: Pool
    observe: Callable[[float], None]  # notes the seconds of a request
    loop: asyncio.AbstractEventLoop
    task: "asyncio.Task[Any]"
    started: float
    until: float | None = None  # of the present wait for the client
    why: str = ""
    timer: asyncio.TimerHandle | None = None
    was_cut: bool = False
    is_answered: bool = False  # the last message is on its way
    is_idle: bool = False  # between two requests

    async def wait(self, client: Awaitable[Result], until: float, why: str) -> Result:
        """Wait for the client; raises :class:`StalledError`."""
        self.until, self.why = until, why
        if until < math.inf and (self.timer is None or self.timer.when() > until):
            self._set_timer(until)
        try:
            return await client
        except asyncio.CancelledError:
            if self.was_cut and not self.task.uncancel():
                raise StalledError(self.why) from None
            raise
        finally:
            self.until = None

    def cut(self, why: str = "") -> None:
        """End the call if it waits for its client."""
        if self.until is not None and not self.was_cut:
            self.why, self.was_cut = why or self.why, True
            self.task.cancel()

    def end(self) -> None:
        """Free the timer."""
        if self.timer is not None:
            self.timer.cancel()

    async def run(self, work: Callable[[], Result], executor: Executor | None = None) -> Result:
        """Run work in the call's lane or on another executor. A cancelled call ends after its work."""
        done: asyncio.Future[Result] = self.loop.create_future()
        self.pool.at_work += 1
        try:
            submit, span = (executor or self.pool).submit, self.call.span
            future = submit(work) if span is NO_SPAN else span.run(submit, work)
            future.add_done_callback(lambda ended: self.loop.call_soon_threadsafe(_copy, ended, done))
            try:
                return await done
            except asyncio.CancelledError:
                ended = asyncio.wrap_future(future)
                await asyncio.wait([ended])
                if not ended.cancelled() and isinstance(error := ended.exception(), Exception):
                    _log_unheard(self.call.rpc, error)
                raise
        finally:
            self.pool.at_work -= 1

    def _set_timer(self, until: float) -> None:
        self.end()
        self.timer = self.loop.call_at(until, self._compare)

    def _compare(self) -> None:
        self.timer = None
        if self.until is None or self.until == math.inf:
            return
        if self.until > self.loop.time():
            self._set_timer(self.until)
        else:
            self.cut()


def fetch_error(ended: "asyncio.Future[Any]") -> None:
    """Fetch the error of what nobody may wait for any more, or asyncio logs that nobody did."""
    if not ended.cancelled():
        ended.exception()


def _log_unheard(rpc: str, error: Exception) -> None:
    """Log the error of work that nobody waits for any more, unless it is an answer."""
    if not isinstance(error, Rejected):
        log.error("internal error", extra={"rpc": rpc}, exc_info=error)


def _copy(ended: "Future[Result]", done: "asyncio.Future[Result]") -> None:
    """Hand a thread's result over to the event loop; a third of the work of :func:`asyncio.wrap_future`."""
    if done.cancelled():
        return
    error = ended.exception()
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(ended.result())
