"""Calls to shards, one or all at once, and the exit status of what they answer."""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from pscore.net.channels import NO_ANSWER, ChannelError, Security, explain, open_channel
from pscore.wire.errors import ErrorCode, details_of
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub

EXIT_DONE, EXIT_UNREACHABLE, EXIT_USAGE, EXIT_REFUSED, EXIT_PARTIAL = 0, 1, 2, 3, 4

_MOST_THREADS = 16
_OPEN = Security()
_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),  # so that an open view shows a shard soon after its restart
    ("grpc.use_local_subchannel_pool", 1),
)
_ADVICE = {
    grpc.StatusCode.UNIMPLEMENTED: "this must be the --listen of a server of this version, not its --health-listen",
    grpc.StatusCode.UNAVAILABLE: "is a server running there (`psservice serve --listen`), and is TLS the same on both "
    "sides (--tls-ca)?",
    grpc.StatusCode.DEADLINE_EXCEEDED: "is the address right, and the network open? --timeout waits longer",
}


class OperateError(Exception):
    """A server gave no answer, or has ``refused`` for a ``reason``; the message has its address and why."""

    def __init__(self, message: str, *, refused: bool = False, reason: ErrorCode | None = None) -> None:
        super().__init__(message)
        self.refused, self.reason = refused, reason


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call to one shard: an answer, or an error."""

    address: str
    answer: Any = None
    error: OperateError | None = None


class ShardClients:
    """Channels to shards at these ``HOST:PORT``, with a deadline for each call; a context (:class:`OperateError`)."""

    def __init__(self, addresses: Sequence[str], timeout_seconds: float, security: Security) -> None:
        self.addresses, self.timeout_seconds = tuple(addresses), timeout_seconds
        self._stubs: dict[str, ParameterServerServiceStub] = {}
        self._open = ExitStack()
        for address in self.addresses:
            try:
                channel = self._open.enter_context(open_channel(address, security, _CHANNEL_OPTIONS))
            except ChannelError as error:
                raise OperateError(f"{address}: {error}") from error
            self._stubs[address] = ParameterServerServiceStub(channel)
        self._threads = ThreadPoolExecutor(min(_MOST_THREADS, len(self.addresses)), thread_name_prefix="shard")
        self._open.callback(self._threads.shutdown, wait=False, cancel_futures=True)

    def __enter__(self) -> "ShardClients":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def one(self, address: str, rpc: str, request: Message, most_seconds: float = math.inf) -> Outcome:
        """Call one shard; wait no longer than ``most_seconds``."""
        try:
            seconds = min(most_seconds, self.timeout_seconds)
            return Outcome(address, getattr(self._stubs[address], rpc)(request, timeout=seconds))
        except grpc.RpcError as error:
            return Outcome(address, error=_as_error(error, address))

    @contextmanager
    def stream(self, address: str, rpc: str, request: Message) -> Iterator[Iterator[Any]]:
        """Call one shard for a stream of answers, which raises :class:`OperateError`; the call ends with the block."""
        call = getattr(self._stubs[address], rpc)(request, timeout=self.timeout_seconds)

        def answers() -> Iterator[Any]:
            try:
                yield from call
            except grpc.RpcError as error:
                raise _as_error(error, address) from error

        try:
            yield answers()
        finally:
            call.cancel()

    def all(
        self, rpc: str, request: Message, addresses: Sequence[str] | None = None, most_seconds: float = math.inf
    ) -> list[Outcome]:
        """Call all shards, or these, at once; the outcomes are in the order of the addresses."""
        chosen = self.addresses if addresses is None else addresses
        return list(self._threads.map(lambda address: self.one(address, rpc, request, most_seconds), chosen))

    def each(self, rpc: str, requests: Mapping[str, Message]) -> list[Outcome]:
        """Call these shards at once, each with a request of its own; the outcomes are in the order of the requests."""
        return list(self._threads.map(lambda address: self.one(address, rpc, requests[address]), requests))


def _as_error(error: grpc.RpcError, address: str) -> OperateError:
    """Return the error of a call that a shard has not answered."""
    code, reason = error.code(), details_of(error).reason
    message = f"{address}: {code.name}: {explain(error, address)}"
    if reason is None and code in _ADVICE:
        message += f"; {_ADVICE[code]}"
    return OperateError(message, refused=reason is not None or code not in NO_ANSWER, reason=reason)


def call(address: str, rpc: str, request: Any, timeout_seconds: float, security: Security = _OPEN) -> Any:
    """Make one call to one shard; raises :class:`OperateError`."""
    with ShardClients((address,), timeout_seconds, security) as shard:
        outcome = shard.one(address, rpc, request)
    if outcome.error is not None:
        raise outcome.error
    return outcome.answer


def exit_status(outcomes: Sequence[Outcome]) -> int:
    """Return the exit status of calls to all shards: done, unreachable, refused, or partly done."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if not errors:
        return EXIT_DONE
    if len(errors) < len(outcomes):
        return EXIT_PARTIAL
    return EXIT_REFUSED if any(error.refused for error in errors) else EXIT_UNREACHABLE
