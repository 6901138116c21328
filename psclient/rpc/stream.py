"""Streams that are cancelled if no message moves; their total time has no limit."""

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc

from psclient.errors import Transient

Octets = Sequence[bytes | memoryview]
"""A serialized message in parts, end to end: its values stay where they are until it is sent."""

_SMALLEST_BYTES = 64 << 10  # below it, a time depends more on delay than on bandwidth
_REMEMBERED = 4  # transfers


class Bandwidth:
    """The fastest of the last large transfers: a lower bound, because other things may have slowed each of them.

    Attributes:
        transfers: the large ones so far.
    """

    def __init__(self) -> None:
        self.transfers = 0
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def bytes_per_second(self) -> float | None:
        """The estimate; ``None`` before the first large transfer."""
        return max(self._recent, default=None)

    def update(self, nbytes: int, seconds: float) -> None:
        """Count a transfer: its bytes behind the first message, and their time without that for decoding."""
        if nbytes >= _SMALLEST_BYTES and seconds > 0:
            self.transfers += 1
            self._recent.append(nbytes / seconds)


_SWEEP_SECONDS = 0.25
_LINGER_SWEEPS = 40  # without a call, so that slow steps need not start a thread each


def _no_limit() -> float:
    return math.inf


class Stream:
    """One bidirectional call; ``begin`` starts it from an iterator of serialized messages.

    The call is cancelled if nothing moves for too long while a request is sent or answered. ``messages`` are all that
    is sent, each made when the one before is on its way; the time of making one does not count. Without them, what
    :meth:`send` is given is sent. :meth:`close` must follow.
    """

    def __init__(self, begin: Callable[[Iterator[bytes]], Any], messages: Iterable[bytes] | None = None) -> None:
        self._outbox: queue.SimpleQueue[Octets | None] = queue.SimpleQueue()
        self._messages = map(b"".join, iter(self._outbox.get, None)) if messages is None else iter(messages)
        self._are_made = messages is not None
        self._is_making = False
        self._sending_since = self._waiting_since = math.inf  # monotonic seconds; infinite while neither is done
        self._busy_seconds = 0.0
        self._idle_seconds = math.inf
        self._limit: Callable[[], float] = _no_limit
        self._has_stalled = False
        self._call = begin(self._outgoing())
        detector.add(self)

    @property
    def is_open(self) -> bool:
        """Whether the call goes on, as far as is known here."""
        return bool(self._call.is_active())

    def begin(self, idle_seconds: float) -> None:
        """Begin a request, in which something must move every so many seconds."""
        self._idle_seconds, self._busy_seconds = idle_seconds, 0.0

    def send(self, message: Octets) -> None:
        """Send a message; waits for nothing.

        The parts are copied together when it is this message's turn, so that the outbox of a slow line has no second
        copy of what is sent. Until then nobody may write to them.
        """
        self._outbox.put(message)

    def receive(self, idle_seconds: float, limit: Callable[[], float]) -> Any:
        """Wait for the next message, no longer than until ``limit`` (monotonic seconds).

        Raises :class:`Transient` if nothing moves or the server ends the stream, and gRPC's errors.
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
            self._waiting_since, self._limit = math.inf, _no_limit  # it may refer to who owns the stream

    def note_receipt(self) -> None:
        """Note that the server has received bytes: the line is slow, and not dead."""
        if not math.isinf(self._sending_since):
            self._sending_since = time.monotonic()
        self._note_progress()

    def cancel(self) -> None:
        """End the call at once."""
        self._outbox.put(None)
        self._call.cancel()

    def close(self) -> None:
        """End the call, and stop the sweeps over it; harmless twice."""
        detector.remove(self)
        self.cancel()

    def sweep(self, now: float) -> None:
        """Cancel the call if a request has not moved for too long; ``now`` is monotonic seconds."""
        is_sending = not math.isinf(self._sending_since)
        since = self._sending_since if is_sending else self._waiting_since
        is_late = not math.isinf(self._waiting_since) and now > self._limit()
        if (now - since > self._idle_seconds and not self._is_making) or is_late:
            self._has_stalled = True
            self.cancel()

    def _outgoing(self) -> Iterator[bytes]:
        """Yield messages to gRPC, which asks for the next one when the one before is on its way."""
        while True:
            self._is_making = self._are_made
            data = next(self._messages, None)
            self._note_progress()
            self._is_making = False
            if data is None:
                break
            self._sending_since = began = time.monotonic()
            yield data
            self._busy_seconds += time.monotonic() - began
            self._sending_since = math.inf
            self._note_progress()
        if self._are_made:
            self._idle_seconds += self._busy_seconds  # the system may hold as much as has been sent until now

    def _note_progress(self) -> None:
        if not math.isinf(self._waiting_since):
            self._waiting_since = time.monotonic()


class _StallDetector:
    """Sweeps over all streaming calls of the process, in one thread that ends after many sweeps without a call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: set[Stream] = set()
        self._thread: threading.Thread | None = None

    def add(self, call: Stream) -> None:
        with self._lock:
            self._calls.add(call)
            if self._thread is None or not self._thread.is_alive():  # dead in a forked child
                self._thread = threading.Thread(target=self._run, name="psclient-watch", daemon=True)
                self._thread.start()

    def remove(self, call: Stream) -> None:
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
