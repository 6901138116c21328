"""One server's channel, and patience: how failed calls are tried again."""

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import grpc

from psclient import executor
from psclient.errors import (
    STEP_AGAIN,
    ConfigurationError,
    ServerFaultError,
    SparsepsError,
    Transient,
    from_rpc_error,
    out_of_patience,
)
from pscore.net.channels import ChannelError, Headers, Security, open_channel
from pscore.wire.errors import ErrorCode, Rejected
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
_POLL_SECONDS = 0.05  # how soon a delay ends that is no longer waited for
_jitter = random.SystemRandom()  # the program's own draws stay as its seed makes them

Call = TypeVar("Call")
Answer = TypeVar("Answer")
HANDSHAKE_SECONDS = 4.0
"""How long to try with somebody who listens there and speaks otherwise, before the first contact."""

_DIAL_SECONDS = 1.0  # the shortest time between two channels, unless there is reason to know better


class Connection:
    """A channel to one shard, replaceable.

    Args:
        address: ``HOST:PORT``, or another name of the shard for messages.
        security: how the channel is protected.
        headers: metadata that every call carries.
        locate: where the shard is now, ``HOST:PORT``; by default at the address.
    """

    def __init__(
        self, address: str, security: Security, headers: Headers = (), locate: Callable[[], str] | None = None
    ) -> None:
        """Dial lazily.

        Raises:
            ConfigurationError: the channel cannot be secured as asked.
        """
        self.address = address
        self._security, self._headers, self._locate = security, tuple(headers), locate
        self._retired: grpc.Channel | None = None
        self._closed = False
        self._calls: dict[Any, executor.Job[Any] | None] = {}
        self._dialled = 0.0
        self._lock = threading.Lock()
        self._channel = self._open()
        self.stub = ParameterServerServiceStub(self._channel)

    def twin(self) -> "Connection":
        """Return another connection to the same shard."""
        return Connection(self.address, self._security, self._headers, self._locate)

    @property
    def is_located(self) -> bool:
        """Whether its address is looked for, and not given."""
        return self._locate is not None

    def renew(self) -> None:
        """Dial anew: a restarted pod keeps its name and changes its address.

        Other threads may have calls on the channel before, so that one ends when the next one is replaced.
        """
        channel = self._open()  # which may have to look for the server
        with self._lock:
            if self._closed:
                channel.close()
                return
            retired, self._retired, self._channel = self._retired, self._channel, channel
            self.stub = ParameterServerServiceStub(channel)
        if retired is not None:  # beside this thread: gRPC has been seen not to return from it after an interrupt
            threading.Thread(target=retired.close, name="psclient-retire", daemon=True).start()

    def reconnect(self) -> None:
        """Dial anew after a call that nobody has answered, but not with every one.

        gRPC asks for the address of a name that does not resolve less and less often, up to two minutes apart, and
        keeps a connection to a machine that is gone until the system gives it up.
        """
        with self._lock:
            if self._closed or time.monotonic() - self._dialled <= _DIAL_SECONDS:
                return
            self._dialled = time.monotonic()
        self.renew()

    def ask(
        self,
        patience: "RetryPolicy",
        start: Callable[[float], Call],
        read: Callable[[Call], Answer],
        meaning: Callable[[grpc.RpcError], Exception] = from_rpc_error,
    ) -> Answer | Rejected:
        """Make a call, again and again where that may help, and return the answer or the server's refusal.

        Args:
            patience: for how long.
            start: begins an attempt that has so many seconds, and waits for nothing.
            read: waits for the answer.
            meaning: what a failed call means.

        Raises:
            ServerUnreachableError: no answer within the patience, or nobody waits for one any longer.
            ServerFaultError: the answer is damaged.
        """
        for attempt in patience:
            with attempt:
                call = start(attempt.timeout)
                try:
                    with self.tracked(call):
                        return read(call)
                except grpc.RpcError as error:
                    failure = meaning(error)
                    if isinstance(failure, Rejected):
                        return failure
                    raise failure from error
                except grpc.FutureCancelledError:
                    raise Transient("the call was cut short") from None
                except Rejected as damage:  # raised by our own decoder
                    raise ServerFaultError(f"{self.address} sent a damaged answer: {damage.detail}") from damage
        raise AssertionError("patience does not end by itself")

    @contextmanager
    def tracked(self, call: Any) -> Iterator[None]:
        """Have :meth:`cut` end a call, if nobody waits for its answer any longer in the body."""
        self._calls[call] = executor.current()
        try:
            yield
        finally:
            del self._calls[call]

    def cut(self) -> None:
        """End the calls for whose answers nobody waits any longer."""
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

    def _open(self) -> grpc.Channel:
        address = self.address if self._locate is None else self._locate()
        self._dialled = time.monotonic()
        try:
            return open_channel(address, self._security, _OPTIONS, self._headers)
        except ChannelError as error:
            raise ConfigurationError(str(error)) from error


class RetryPolicy:
    """How long one undertaking may take over all its attempts.

    Use::

        for attempt in Patience(address, seconds, deadline_seconds):
            with attempt:
                return stub.Call(request, timeout=attempt.timeout)

    A :class:`~psclient.errors.Transient` raised inside leads to another attempt after a jittered delay, with twice the
    deadline: a transfer may be larger, or the network slower, than the first one allowed for. The last attempt has the
    deadline of the first at least, so the end may come that much later: a server that answers slowly is not taken for
    one that does not answer. An attempt fails at once where nothing listens, so that this can be said.
    """

    def __init__(
        self,
        address: str,
        seconds: float,
        deadline_seconds: float,
        hint: str = STEP_AGAIN,
        limit: Callable[[], float] = lambda: math.inf,
        reconnect: Callable[[], None] = lambda: None,
        handshake_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        """Begin now.

        ``hint`` says what to do at the end, which ``limit`` (monotonic seconds) may bring forward; ``reconnect`` is
        called before another attempt where the server may be at another address by then. ``handshake_seconds`` is
        the patience with somebody who listens there and speaks otherwise.
        """
        self.address = address
        self.timeout = deadline_seconds
        self._first_deadline_seconds = self._deadline_seconds = deadline_seconds
        self._started = time.monotonic()
        self._seconds = seconds
        self._delay = _FIRST_DELAY_SECONDS
        self._warned_of: set[ErrorCode | None] = set()
        self._hint = hint
        self.limit = limit
        self._look_again = reconnect
        self._handshake_seconds = handshake_seconds

    def __iter__(self) -> "RetryPolicy":
        """Iterate over attempts."""
        return self

    def __next__(self) -> "RetryPolicy":
        """Begin an attempt; its deadline is in :attr:`timeout`, seconds."""
        now = time.monotonic()
        remaining = max(self._first_deadline_seconds, self._seconds - (now - self._started))
        self.timeout = max(0.1, min(self._deadline_seconds, remaining, self._end() - now))
        return self

    def progressed(self) -> None:
        """Begin the time anew: something has moved."""
        self._started = time.monotonic()
        self._delay = _FIRST_DELAY_SECONDS

    def __enter__(self) -> "RetryPolicy":
        """Enter an attempt."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Swallow a transient failure after a delay, or raise ``ServerUnreachableError`` at the end."""
        if error is None and self._warned_of:
            log.warning("%s answers again, after %.0f s", self.address, time.monotonic() - self._started)
        if not isinstance(error, Transient):
            return False
        elapsed = time.monotonic() - self._started
        delay = error.retry_seconds or self._delay * _jitter.uniform(0.5, 1.5)
        patience_seconds = min(self._seconds, self._handshake_seconds) if error.advice else self._seconds
        if elapsed + delay >= patience_seconds or time.monotonic() + delay >= self._end():
            raise out_of_patience(self.address, elapsed, error, self._hint) from None
        long_wait = error.retry_seconds is None or error.reason is ErrorCode.NOT_DURABLE
        if long_wait and error.reason not in self._warned_of:
            self._warned_of.add(error.reason)  # silence, and then a server that refuses, are two pieces of news
            what = "does not answer" if error.reason is None else "does not serve now"
            why = f"{error.advice}: {error}" if error.advice else error
            log.warning("%s %s (%s); trying for %.0f s more", self.address, what, why, patience_seconds - elapsed)
        pause(delay)
        if error.lost:
            self._look_again()
        if error.retry_seconds is None:
            self._deadline_seconds *= 2
        self._delay = min(_LONGEST_DELAY_SECONDS, 2 * self._delay)
        return True

    def _end(self) -> float:
        """Return when all patience ends (monotonic seconds)."""
        return 0.0 if executor.is_cancelled() else self.limit()


def pause(seconds: float) -> None:
    """Wait, unless or until nobody waits for what this thread does."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not executor.is_cancelled():
        time.sleep(min(left, _POLL_SECONDS))


def suppress_errors(call: Callable[[], object]) -> None:
    """Make a call whose failure is of no consequence."""
    try:
        call()
    except (
        grpc.RpcError,
        grpc.FutureCancelledError,
        SparsepsError,
        ValueError,
    ) as error:  # ValueError: a closed channel
        log.debug("ignored: %s", error)
