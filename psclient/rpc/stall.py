"""Streams that are cancelled when no message moves; their total time has no limit."""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import grpc

from psclient.errors import Transient

Message = TypeVar("Message")

_SWEEP_SECONDS = 0.25
_LINGER_SWEEPS = 40  # without a call, so that slow steps need not start a thread each


class StreamCall:
    """One streaming call, cancelled after ``idle_seconds`` without a message, or at ``limit`` (monotonic seconds).

    :meth:`end` must follow :meth:`start`; :meth:`messages` and :meth:`result` call it.
    """

    def __init__(self, idle_seconds: float, limit: Callable[[], float] = lambda: math.inf) -> None:
        self.limit = limit
        self._call: Any = None
        self._has_stalled = False
        self._idle_seconds = idle_seconds
        self._since = time.monotonic()  # infinite while there is nothing to send
        self._busy_seconds = 0.0

    def start(self, call: Any) -> "StreamCall":
        """Watch a call that gRPC has begun."""
        self._call = call
        detector.add(self)
        return self

    def outgoing(self, messages: Iterator[Message]) -> Iterator[Message]:
        """Yield messages to gRPC, which asks for the next one when the one before is on its way."""
        while True:
            self._busy_seconds += time.monotonic() - self._since
            self._since = math.inf
            message = next(messages, None)
            self._since = time.monotonic()
            if message is None:
                self._idle_seconds += self._busy_seconds  # the system may hold as much as has been sent until now
                return
            yield message

    def note_receipt(self) -> None:
        """Note that the server has received bytes: the line is slow, and not dead."""
        if not math.isinf(self._since):
            self._since = time.monotonic()

    def messages(self) -> Iterator[Any]:
        """Yield what the server answers, and end; raises :class:`Transient` for a stalled call."""
        with self._reading():
            for message in self._call:
                self._since = time.monotonic()
                yield message

    def result(self) -> Any:
        """Wait for the one answer, and end; raises :class:`Transient` for a stalled call."""
        with self._reading():
            return self._call.result()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (grpc.RpcError, grpc.FutureCancelledError):
            if self._has_stalled:
                raise Transient(f"nothing has moved for {self._idle_seconds:.0f} s", lost=True) from None
            raise
        finally:
            self.end()

    def cancel(self) -> None:
        """End the call, if one has begun."""
        if self._call is not None:
            self._call.cancel()

    def end(self) -> None:
        """Stop the sweeps over this call, and cancel the call if it goes on."""
        detector.remove(self)
        self.cancel()

    def sweep(self, now: float) -> None:
        """Cancel the call if nothing has moved for too long; ``now`` is monotonic seconds."""
        if now - self._since > self._idle_seconds or now > self.limit():
            self._has_stalled = True
            self.cancel()


class OpenStream:
    """One bidirectional stream; ``method`` begins its call from an iterator of serialized messages.

    The stream is cancelled where nothing moves for too long while a request is sent or answered.
    """

    def __init__(self, method: Callable[[Iterator[bytes]], Any]) -> None:
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sending_since = self._waiting_since = math.inf  # monotonic seconds; infinite while neither is done
        self._busy_seconds = 0.0
        self._idle_seconds = math.inf
        self._limit: Callable[[], float] = lambda: math.inf
        self._has_stalled = False
        self._call = method(self._outgoing())
        detector.add(self)

    @property
    def is_open(self) -> bool:
        """Whether the call goes on, as far as is known here."""
        return bool(self._call.is_active())

    def begin(self, idle_seconds: float) -> None:
        """Begin a request, in which something must move every so many seconds."""
        self._idle_seconds, self._busy_seconds = idle_seconds, 0.0

    def send(self, data: bytes) -> None:
        """Send a message; waits for nothing."""
        self._outbox.put(data)

    def receive(self, idle_seconds: float, limit: Callable[[], float]) -> Any:
        """Wait for the next message, until ``limit`` (monotonic seconds) at most.

        Raises :class:`Transient` where nothing moves or the server ends the stream, and gRPC's errors.
        """
        # The system may hold as much as has been sent until now.
        self._idle_seconds, self._limit = idle_seconds + self._busy_seconds, limit
        self._waiting_since = time.monotonic()
        try:
            return next(self._call)
        except StopIteration:
            raise Transient("the server has ended the stream", lost=True) from None
        except (grpc.RpcError, grpc.FutureCancelledError):
            if self._has_stalled:
                raise Transient(f"nothing has moved for {self._idle_seconds:.0f} s", lost=True) from None
            raise
        finally:
            self._waiting_since = math.inf

    def note_receipt(self) -> None:
        """Note that the server has received bytes: the line is slow, and not dead."""
        if not math.isinf(self._sending_since):
            self._sending_since = time.monotonic()
        if not math.isinf(self._waiting_since):
            self._waiting_since = time.monotonic()

    def cancel(self) -> None:
        """End the call at once."""
        self._outbox.put(None)
        self._call.cancel()

    def close(self) -> None:
        """End the call, and stop the sweeps over it."""
        detector.remove(self)
        self.cancel()

    def sweep(self, now: float) -> None:
        """Cancel the call where a request has not moved for too long; ``now`` is monotonic seconds."""
        is_sending = not math.isinf(self._sending_since)
        since = self._sending_since if is_sending else self._waiting_since
        is_late = not math.isinf(self._waiting_since) and now > self._limit()
        if now - since > self._idle_seconds or is_late:
            self._has_stalled = True
            self.cancel()

    def _outgoing(self) -> Iterator[bytes]:
        """Yield messages to gRPC, which asks for the next one when the one before is on its way."""
        while (data := self._outbox.get()) is not None:
            self._sending_since = began = time.monotonic()
            yield data
            now = time.monotonic()
            self._busy_seconds += now - began
            self._sending_since = math.inf
            if not math.isinf(self._waiting_since):
                self._waiting_since = now


class Watched(Protocol):
    """A stream that can be swept."""

    def sweep(self, now: float) -> None:
        """Cancel the stream if nothing has moved for too long; ``now`` is monotonic seconds."""


class _StallDetector:
    """Sweeps over all streaming calls of the process, in one thread that ends after many sweeps without a call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: set[Watched] = set()
        self._thread: threading.Thread | None = None

    def add(self, call: Watched) -> None:
        with self._lock:
            self._calls.add(call)
            if self._thread is None or not self._thread.is_alive():  # dead in a forked child
                self._thread = threading.Thread(target=self._run, name="psclient-watch", daemon=True)
                self._thread.start()

    def remove(self, call: Watched) -> None:
        with self._lock:
            self._calls.discard(call)

    def _run(self) -> None:
        empty = 0
        while True:
            time.sleep(_SWEEP_SECONDS)
            with self._lock:
                calls = [*self._calls]
                empty = 0 if calls else empty + 1
                if empty == _LINGER_SWEEPS:
                    self._thread = None
                    return
            for call in calls:
                call.sweep(time.monotonic())


detector = _StallDetector()
"""Of this process."""
