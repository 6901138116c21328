"""One shard's channel, and how long failed calls are repeated."""

import logging
import math
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from psclient import executor
from psclient.errors import (
    STEP_AGAIN,
    AccessError,
    ConfigurationError,
    ServerFaultError,
    SparsepsError,
    Transient,
    from_rpc_error,
    out_of_patience,
)
from pscore.net.channels import ChannelError, Headers, Security, open_channel
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub

log = logging.getLogger("psclient")

_OPTIONS = (
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 3_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel really dials anew
)
_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 0.1, 3.0
_POLL_SECONDS = 0.05  # how soon the delay of a cancelled job ends
_DIAL_SECONDS = 1.0  # the shortest time between two channels, unless there is reason to know better
_jitter = random.SystemRandom()  # the program's own draws stay as its seed makes them

Answer = TypeVar("Answer")
_SERVICE = pb.DESCRIPTOR.services_by_name["ParameterServerService"].full_name
HANDSHAKE_SECONDS = 4.0  # before the first contact, with a listener that does not speak this protocol
_BUSY_SECONDS = 15.0
"""How long a server may be silent before that is said: on a busy machine a healthy one may take ten seconds to begin.

A connection that is refused, or breaks, is said at once.
"""
_LASTING = (ErrorCode.NOT_DURABLE, ErrorCode.NO_STANDBY)
"""Reasons that somebody has to see to, though the server says when to come back."""


@dataclass
class RetryPolicy:
    """How long a call may take over all its attempts; the last may begin at the end of ``seconds``, and ends later.

    The deadline doubles from attempt to attempt, since a transfer may be larger, or the network slower, than the first
    deadline, ``deadline_seconds``, allowed. ``hint`` tells a user how to go on after the last attempt. ``limit`` is an
    end in any case, in monotonic seconds. A listener that does not speak this protocol is tried for
    ``handshake_seconds`` only.
    """

    seconds: float
    deadline_seconds: float
    hint: str = STEP_AGAIN
    limit: Callable[[], float] = lambda: math.inf
    handshake_seconds: float = HANDSHAKE_SECONDS

    def __post_init__(self) -> None:
        self._deadline_seconds = self.deadline_seconds
        self._warned_of: set[ErrorCode | None] = set()
        self._failures = 0
        self.progressed()

    def progressed(self) -> None:
        """Begin the time anew: something has moved."""
        self._started = time.monotonic()
        self._delay = _FIRST_DELAY_SECONDS

    def run(
        self, address: str, attempt: Callable[[float], Answer], reconnect: Callable[[], None] = lambda: None
    ) -> Answer:
        """Repeat an attempt, given its deadline in seconds, while it raises :class:`Transient` and there is time.

        ``reconnect`` is called before another attempt if the server may be at another address by then.
        """
        while True:
            now = time.monotonic()
            remaining = max(self.deadline_seconds, self.seconds - (now - self._started))
            try:
                result = attempt(max(0.1, min(self._deadline_seconds, remaining, self._end() - now)))
            except Transient as failure:
                self._await_next(address, failure, time.monotonic() - now)
                if failure.lost:
                    reconnect()
                continue
            if self._warned_of:
                log.warning("%s answers again, after %.0f s", address, time.monotonic() - self._started)
            return result

    def _await_next(self, address: str, failure: Transient, attempt_seconds: float) -> None:
        """Wait before the next attempt; a server's delay counts from the beginning of the one that has failed."""
        now = time.monotonic()
        elapsed = now - self._started
        self._failures += 1
        if failure.retry_seconds is None:
            delay = self._delay * _jitter.uniform(0.5, 1.5)
        else:
            delay = max(0.0, failure.retry_seconds - attempt_seconds)
        seconds = min(self.seconds, self.handshake_seconds) if failure.advice else self.seconds
        left = min(seconds - elapsed, self._end() - now)
        if delay >= left:
            raise out_of_patience(address, elapsed, failure, self.hint) from None
        is_long = failure.retry_seconds is None or failure.reason in _LASTING
        if self._may_be_busy(failure, elapsed):
            log.info("%s: %s; trying for %.0f s more", address, failure, left)
        elif is_long and failure.reason not in self._warned_of:
            self._warned_of.add(failure.reason)  # silence, and then a server that refuses, are two pieces of news
            what = "does not answer" if failure.reason is None else "does not serve now"
            why = f"{failure.advice}: {failure}" if failure.advice else failure
            log.warning("%s %s: %s; trying for %.0f s more", address, what, why, left)
        pause(delay)
        if failure.retry_seconds is None:
            self._deadline_seconds *= 2
        self._delay = min(_LONGEST_DELAY_SECONDS, 2 * self._delay)

    def _may_be_busy(self, failure: Transient, elapsed: float) -> bool:
        """Tell whether a failure is no news yet: of a server or a worker that starts, compiles or shares its cores."""
        if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return elapsed < min(_BUSY_SECONDS, self.seconds / 2)
        return failure.code is grpc.StatusCode.CANCELLED and self._failures == 1  # a stream that was idle for too long

    def _end(self) -> float:
        return 0.0 if executor.is_cancelled() else self.limit()


class Connection:
    """A channel to one shard, which can be dialled anew.

    ``locate`` returns the shard's address now, ``HOST:PORT``, and ``address`` is then a name for messages. A channel
    that cannot be secured as asked raises :class:`ConfigurationError`.

    Attributes:
        stub: calls by messages.
        pushes: begins the stream of pushes, of serialized requests.
        pulls: begins the stream of pulls, of serialized requests and answers.
        uploads, downloads: begin the stream of one model; messages with values are serialized
            (:mod:`pscore.wire.dense`).
        cuts: begins the stream of a cut's values, serialized likewise.
    """

    def __init__(
        self, address: str, security: Security, headers: Headers = (), locate: Callable[[], str] | None = None
    ) -> None:
        self.address, self.locate = address, locate
        self._security, self._headers = security, tuple(headers)
        self._retired: grpc.Channel | None = None
        self._closed = False
        self._dialled = 0.0
        self._calls: dict[Any, executor.Job[Any] | None] = {}
        self._lock = threading.Lock()
        self._use(self._open())

    def places(self) -> frozenset[str]:
        """Return the numeric addresses of the shard, ``IP:PORT``, as its name is resolved now; may take seconds."""
        host, _, port = self._target.rpartition(":")
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except (OSError, ValueError):  # a proxy may resolve the name
            return frozenset()
        return frozenset(f"{address[0]}:{port}" for *_, address in found)

    def twin(self) -> "Connection":
        """Return a second connection to the same shard."""
        return Connection(self.address, self._security, self._headers, self.locate)

    def reconnect(self, *, at_once: bool = False) -> None:
        """Dial anew, after calls without an answer at most once a second; a restarted pod changes its address.

        gRPC itself resolves a lost name less and less often, and keeps a dead connection as long as the system does.
        Other threads may have calls on the channel before, so that channel is closed when the next one is replaced.
        While certificates cannot be used, as in the middle of their replacement, the channel before stays.
        """
        with self._lock:
            if self._closed or not (at_once or time.monotonic() - self._dialled > _DIAL_SECONDS):
                return
            self._dialled = time.monotonic()
        try:
            channel = self._open()  # outside of the lock: a lookup may take seconds
        except ConfigurationError as error:
            log.warning("%s is dialled with the certificates before: %s", self.address, error)
            return
        with self._lock:
            if self._closed:
                channel.close()
                return
            retired, self._retired = self._retired, self._channel
            self._use(channel)
        if retired is not None:  # in another thread: gRPC has been seen not to return from it after an interrupt
            threading.Thread(target=retired.close, name="psclient-retire", daemon=True).start()

    def call(self, policy: RetryPolicy, attempt: Callable[[float], Answer]) -> Answer | Rejected:
        """Make a call, again if that may help, and return the answer or the server's refusal.

        ``attempt`` gets its deadline in seconds, and waits for the answer, by :meth:`result` or in :meth:`tracked`. It
        begins a new call or stream each time but the first: one that is refused for its token is repeated once, since
        an open stream has the token of its beginning, and a token file may have changed.
        :class:`ServerUnreachableError` if no answer comes in time, or the calling thread's job is cancelled;
        :class:`ServerFaultError` for a damaged answer.
        """
        may_repeat = self._security.token_file is not None

        def once(seconds: float) -> Answer | Rejected:
            try:
                return attempt(seconds)
            except grpc.RpcError as error:
                failure = from_rpc_error(error, self._target)
                if isinstance(failure, Rejected):
                    return failure
                raise failure from error
            except grpc.FutureCancelledError:
                raise Transient("the call was cut short") from None
            except Rejected as damage:  # raised by our own decoder
                raise ServerFaultError(f"{self.address} sent a damaged answer: {damage.detail}") from damage
            except DecodeError as damage:
                raise ServerFaultError(f"{self.address} sent a damaged answer, no message of this protocol") from damage

        def translated(seconds: float) -> Answer | Rejected:
            nonlocal may_repeat
            try:
                return once(seconds)
            except AccessError:
                if not may_repeat:
                    raise
            # No function here refers to itself: what an attempt refers to, as a whole push, is freed with the call.
            may_repeat = False
            return once(seconds)

        return policy.run(self.address, translated, self.reconnect)

    def result(self, call: Any) -> Any:
        """Wait for a call's one answer, as :meth:`tracked`."""
        with self.tracked(call):
            return call.result()

    @contextmanager
    def tracked(self, call: Any) -> Iterator[None]:
        """Let :meth:`cancel_unawaited` end a call during the body."""
        self._calls[call] = executor.current()
        try:
            yield
        finally:
            del self._calls[call]

    def cancel_unawaited(self) -> None:
        """End the calls of cancelled jobs."""
        for call, job in list(self._calls.items()):
            if job is not None and job.is_cancelled:
                call.cancel()

    def close(self) -> None:
        """Close the channel."""
        with self._lock:
            self._closed = True
            self._channel.close()
            if self._retired is not None:
                self._retired.close()

    def _use(self, channel: grpc.Channel) -> None:
        """Make all calls on a channel from now on."""
        self._channel, self.stub = channel, ParameterServerServiceStub(channel)
        self.pushes: Any = channel.stream_stream(f"/{_SERVICE}/PushSparse", None, pb.PushSparseResponse.FromString)
        self.pulls: Any = channel.stream_stream(f"/{_SERVICE}/PullDiff")
        self.uploads: Any = channel.stream_stream(f"/{_SERVICE}/UploadModel", None, pb.UploadModelResponse.FromString)
        self.downloads: Any = channel.stream_stream(f"/{_SERVICE}/DownloadModel")
        self.cuts: Any = channel.stream_stream(f"/{_SERVICE}/ReadCut")

    def _open(self) -> grpc.Channel:
        self._target = self.address if self.locate is None else self.locate()
        self._dialled = time.monotonic()
        try:
            return open_channel(self._target, self._security, _OPTIONS, self._headers)
        except ChannelError as error:
            raise ConfigurationError(str(error)) from error


def pause(seconds: float) -> None:
    """Wait, as long as the calling thread's job is not cancelled."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not executor.is_cancelled():
        time.sleep(min(left, _POLL_SECONDS))


def suppress_errors(call: Callable[[], object]) -> None:
    """Make a call whose failure is of no consequence."""
    try:
        call()
    except (grpc.RpcError, grpc.FutureCancelledError, SparsepsError, ValueError) as error:  # ValueError: closed channel
        log.debug("ignored: %s", error)
