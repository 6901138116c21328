"""A stream that stays open for a worker's life: requests one after another, and the answers in their order."""

import math
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from psclient.errors import Transient
from psclient.rpc.stall import detector


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
