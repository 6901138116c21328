"""Asking shards: one call, or the same call to all at once; and what the answers are worth as an exit status."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from pscore.net.channels import ChannelError, Security, explain, open_channel
from pscore.wire.errors import ErrorCode, details_of
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub

EXIT_DONE, EXIT_UNREACHABLE, EXIT_USAGE, EXIT_REFUSED, EXIT_PARTIAL = 0, 1, 2, 3, 4

_MOST_THREADS = 16
_OPEN = Security()
_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),  # a view that stays open sees a shard soon after it is back
    ("grpc.use_local_subchannel_pool", 1),
)


class OperateError(Exception):
    """A server could not be asked, or has refused; the message has its address and why.

    Attributes:
        refused: whether the server has answered.
        reason: its reason, where it has given one that is known here.
    """

    def __init__(self, message: str, *, refused: bool = False, reason: ErrorCode | None = None) -> None:
        """Say which server and why."""
        super().__init__(message)
        self.refused, self.reason = refused, reason


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call to one shard: an answer, or an error."""

    address: str
    answer: Any = None
    error: OperateError | None = None


class Line:
    """A channel to one shard that stays open between calls.

    Args:
        address: ``HOST:PORT``.
        security: TLS and token.
    """

    def __init__(self, address: str, security: Security) -> None:
        """Dial lazily; raises :class:`OperateError` where the channel cannot be secured as asked."""
        self.address = address
        try:
            self._channel = open_channel(address, security, _CHANNEL_OPTIONS)
        except ChannelError as error:
            raise OperateError(f"{address}: {error}") from error
        self._stub = ParameterServerServiceStub(self._channel)

    def call(self, rpc: str, request: Message, timeout_seconds: float) -> Any:
        """Make one call; raises :class:`OperateError`."""
        try:
            return getattr(self._stub, rpc)(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            reason = details_of(error).reason
            refused = reason is not None or error.code() not in _NO_ANSWER
            message = f"{self.address}: {error.code().name}: {explain(error.details() or '')}"
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                message += "; this must be the --listen of a server of this version, not its --health-listen"
            raise OperateError(message, refused=refused, reason=reason) from error

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


class Lines:
    """Channels to all shards, asked at once. Use as a context.

    Args:
        addresses: each shard's ``HOST:PORT``.
        timeout_seconds: deadline of each call.
        security: TLS and token.
    """

    def __init__(self, addresses: Sequence[str], timeout_seconds: float, security: Security) -> None:
        """Dial lazily; raises :class:`OperateError` where a channel cannot be secured as asked."""
        self.addresses = tuple(addresses)
        self.timeout_seconds = timeout_seconds
        self._lines = {address: Line(address, security) for address in self.addresses}
        self._threads = ThreadPoolExecutor(min(_MOST_THREADS, len(self.addresses)), thread_name_prefix="shard")

    def __enter__(self) -> "Lines":
        """Return the channels."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close them."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for line in self._lines.values():
            line.close()

    def one(self, address: str, rpc: str, request: Message, most_seconds: float = math.inf) -> Outcome:
        """Ask one shard; wait no longer than ``most_seconds``."""
        seconds = min(most_seconds, self.timeout_seconds)
        try:
            return Outcome(address, answer=self._lines[address].call(rpc, request, seconds))
        except OperateError as error:
            return Outcome(address, error=error)

    def all(
        self,
        rpc: str,
        request: Message,
        addresses: Sequence[str] | None = None,
        most_seconds: float = math.inf,
    ) -> list[Outcome]:
        """Ask all shards, or these, at once; the outcomes are in the order of the addresses."""
        chosen = self.addresses if addresses is None else addresses
        return list(self._threads.map(lambda address: self.one(address, rpc, request, most_seconds), chosen))


def call(address: str, rpc: str, request: Any, timeout_seconds: float, security: Security = _OPEN) -> Any:
    """Make one call to one shard; raises :class:`OperateError`."""
    line = Line(address, security)
    try:
        return line.call(rpc, request, timeout_seconds)
    finally:
        line.close()


def exit_status(outcomes: Sequence[Outcome]) -> int:
    """Return what a command that has done nothing else ends with: done, unreachable, refused, or partly done."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if not errors:
        return EXIT_DONE
    if len(errors) < len(outcomes):
        return EXIT_PARTIAL
    return EXIT_REFUSED if any(error.refused for error in errors) else EXIT_UNREACHABLE
