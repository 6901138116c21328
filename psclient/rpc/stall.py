"""Calls that are cancelled when nothing moves: a stream may take as long as its bytes do, but not stand still."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

import grpc

from psclient.errors import Transient

Message = TypeVar("Message")
Followed = TypeVar("Followed", bound="Cancellable")

_SWEEP_SECONDS = 0.25
_LINGER_SWEEPS = 40  # without a call, after which the thread ends


class Cancellable(Protocol):
    """A gRPC call."""

    def cancel(self) -> object:
        """End it."""


class Watch:
    """When a message of one call has moved last; :meth:`follow` begins to watch, :meth:`end` must come.

    Args:
        idle_seconds: without a message that moves, after which the call is cancelled.
        limit: when it is cancelled in any case, by the monotonic clock.

    Attributes:
        limit: that.
    """

    def __init__(self, idle_seconds: float, limit: Callable[[], float] = lambda: math.inf) -> None:
        """Begin to count now."""
        self.limit = limit
        self._call: Cancellable | None = None
        self._has_stalled = False
        self._idle_seconds = idle_seconds
        self._since = time.monotonic()
        self._busy_seconds = 0.0

    def moved(self) -> None:
        """Note that a message has come, or that the next one waits for the line."""
        self._since = time.monotonic()

    def heard(self) -> None:
        """Note that the other side has got bytes of what was sent: the line is slow, and not dead."""
        if not math.isinf(self._since):
            self._since = time.monotonic()

    def rest(self) -> None:
        """Note that the line has nothing to do: the next message is not there yet."""
        self._busy_seconds += time.monotonic() - self._since
        self._since = math.inf

    def sent(self) -> None:
        """Note that the last message was handed to the system, which may hold as much as has passed until now."""
        self._idle_seconds += self._busy_seconds
        self.moved()

    def require_moving(self) -> None:
        """Raise :class:`Transient` if the call was cancelled here."""
        if self._has_stalled:
            raise Transient(f"nothing has moved for {self._idle_seconds:.0f} s", lost=True)

    def sweep(self, now: float) -> None:
        """Cancel the call if it stands still."""
        if (now - self._since > self._idle_seconds or now > self.limit()) and self._call is not None:
            self._has_stalled = True
            self._call.cancel()

    def follow(self, call: Followed) -> Followed:
        """Watch a call, and return it."""
        self._call = call
        _watcher.add(self)
        return call

    def messages(self, call: Iterator[Message]) -> Iterator[Message]:
        """Yield what a call that is followed answers, and end.

        Raises:
            grpc.RpcError: the call has failed.
            Transient: it was cancelled here.
        """
        try:
            for message in call:
                self.moved()
                yield message
        except grpc.RpcError:
            self.require_moving()
            raise
        finally:
            self.end()

    def result(self, call: "grpc._CallFuture[Message]") -> Message:
        """Wait for the answer of a call that is followed, and end.

        Raises:
            grpc.RpcError: the call has failed.
            grpc.FutureCancelledError: it was cancelled elsewhere.
            Transient: it was cancelled here.
        """
        try:
            return call.result()
        except grpc.FutureCancelledError:
            self.require_moving()
            raise
        finally:
            self.end()

    def end(self) -> None:
        """Watch it no longer, and cancel it if it goes on."""
        _watcher.remove(self)
        if self._call is not None:
            self._call.cancel()


class Outgoing(Generic[Message]):
    """The messages of a stream, as gRPC takes them: it asks for the next one when the one before is on its way.

    Args:
        messages: what is sent.
        watch: of the call.
    """

    def __init__(self, messages: Iterator[Message], watch: Watch) -> None:
        """Nothing is sent yet."""
        self._messages, self._watch = messages, watch

    def __iter__(self) -> "Outgoing[Message]":
        """Return this."""
        return self

    def __next__(self) -> Message:
        """Return the next message."""
        self._watch.rest()
        try:
            message = next(self._messages)
        except StopIteration:
            self._watch.sent()
            raise
        self._watch.moved()
        return message


class _Watcher:
    """One thread for all calls of the process; there is none while nobody calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: set[Watch] = set()
        self._thread: threading.Thread | None = None

    def add(self, watch: Watch) -> None:
        with self._lock:
            self._watches.add(watch)
            if self._thread is None or not self._thread.is_alive():  # dead in a forked child
                self._thread = threading.Thread(target=self._run, name="psclient-watch", daemon=True)
                self._thread.start()

    def remove(self, watch: Watch) -> None:
        with self._lock:
            self._watches.discard(watch)

    def _run(self) -> None:
        empty = 0
        while empty < _LINGER_SWEEPS:
            time.sleep(_SWEEP_SECONDS)
            with self._lock:
                watches = list(self._watches)
                empty = 0 if watches else empty + 1
                if empty == _LINGER_SWEEPS:
                    self._thread = None
            now = time.monotonic()
            for watch in watches:
                watch.sweep(now)


_watcher = _Watcher()
