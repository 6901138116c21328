"""The server that a relay follows: its cuts, and the differences that lead to one."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from pscore.names import escaped
from pscore.net.addresses import AddressError
from pscore.net.channels import ChannelError, Security, explain, open_channel
from pscore.net.discovery import DiscoveryError, find
from pscore.net.moving import moving
from pscore.reader.cut import Cut
from pscore.reader.transfer import CutTransfer, FetchedShard
from pscore.wire.errors import Rejected, details_of
from pscore.wire.messages import type_to_message
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from psservice.cuts.shadow import ReaderType
from psservice.rpc.bounds import require
from psservice.settings import ServerSettings
from psservice.values import require_name

READ_CUT = "/sparseps.v1.ParameterServerService/ReadCut"
FIRST_WAIT_SECONDS, WAIT_SECONDS = 5.0, 25.0
"""How long the source holds an answer: if it may have no model, and if it may have no newer cut."""

_OTHER_RELEASE = (
    "is this a psservice of a release that this one understands? Correct --of, or upgrade the older of the two"
)
_ANSWER_SECONDS = 15.0  # beyond that, and for a call that waits for nothing
_IDLE_SECONDS = 30.0  # without a message, after which a transfer is broken off
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 10_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
)


_UNREADABLE = "Exception deserializing"  # gRPC's words
_FLAGS = {
    "(--tls-ca, PSCLIENT_TLS_CA)": "(--source-ca)",
    "(--tls-cert and --tls-key, PSCLIENT_TLS_CERT and PSCLIENT_TLS_KEY)": "(--source-cert and --source-key)",
    "PSCLIENT_TLS_CA": "--source-ca",
    "PSCLIENT_TLS_CERT": "--source-cert",
    "PSCLIENT_TLS_KEY": "--source-key",
    "PSCLIENT_TLS_SERVER_NAME": "--tls-server-name",
    "PSCLIENT_TOKEN_FILE": "--source-token-file",
}
"""What other clients of a server are given, and how a relay is."""


class SourceError(Exception):
    """The source cannot be reached, or refuses; the message says why, and names a relay's flags."""

    def __init__(self, why: str) -> None:
        for name, flag in _FLAGS.items():
            why = why.replace(name, flag)
        super().__init__(f"{why.removesuffix('!')}: {_OTHER_RELEASE}" if _UNREADABLE in why else why)


def security_of(settings: ServerSettings) -> Security:
    """Return how a relay protects its channels to the source."""
    return Security(
        ca=settings.source_ca,
        cert=settings.source_cert,
        key=settings.source_key,
        server_name=settings.tls_server_name,
        token_file=settings.source_token_file,
    )


def addresses_of(settings: ServerSettings, seconds: float) -> tuple[tuple[str, ...], Security]:
    """Return the address of each shard of the source; raises :class:`SourceError`."""
    try:
        return find(settings.source, security_of(settings), seconds)
    except (AddressError, ChannelError, DiscoveryError) as error:
        raise SourceError(str(error)) from error


class CutSource(Protocol):
    """The calls that a relay makes to its source."""

    def await_cut(self, request: pb.AwaitCutRequest) -> pb.AwaitCutResponse:
        """Ask the source's shard 0; raises :class:`SourceError`, and :class:`Rejected` as the source does."""

    def read(self, transfer: CutTransfer, cut: Cut, held: Cut | None, buffers: bytes) -> FetchedShard:
        """Return the difference to a cut in this shard; raises as :meth:`await_cut`. ``transfer`` keeps a beginning."""

    def close(self) -> None:
        """Break off every call."""


class Source:
    """One shard's connections to the source: to its shard 0, which names the cuts, and to its own counterpart."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings, self._index = settings, settings.shard_index
        self._channels: list[grpc.Channel] = []
        self._calls: set[Any] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._address = settings.source

    def await_cut(self, request: pb.AwaitCutRequest) -> pb.AwaitCutResponse:
        """See :class:`CutSource`."""
        with self._calling(0) as channel:
            stub = ParameterServerServiceStub(channel)
            call = stub.AwaitCut.future(request, timeout=request.wait_seconds + _ANSWER_SECONDS)
            with self._tracked(call):
                answer: pb.AwaitCutResponse = call.result()
        require_name("the source's run id", answer.cut.run_id)
        for part in answer.cut.shards:
            require(part)
        return answer

    def read(self, transfer: CutTransfer, cut: Cut, held: Cut | None, buffers: bytes) -> FetchedShard:
        """See :class:`CutSource`."""
        asked = transfer.asked(cut, held, buffers)
        with self._calling(self._index) as channel:
            read_cut: Any = channel.stream_stream(READ_CUT)
            call = read_cut(iter([asked.request.SerializeToString()]))
            with self._tracked(call):
                return asked.read(moving(call, _IDLE_SECONDS))

    def close(self) -> None:
        """See :class:`CutSource`."""
        with self._lock:
            self._closed = True
            calls = [*self._calls]
        for call in calls:
            call.cancel()
        self._hang_up()

    def _channel(self, index: int) -> grpc.Channel:
        """Return a channel to a shard of the source; its addresses are found anew after each failure."""
        if not self._channels:
            settings = self._settings
            addresses, security = addresses_of(settings, _ANSWER_SECONDS)
            if len(addresses) != settings.num_shards:
                _require_answer(addresses[0], security)
                raise SourceError(
                    f"{settings.source} is the address of {len(addresses)} shards, and this relay has "
                    f"{settings.num_shards}: name each shard of the source; or, if it has another number of shards by "
                    "now, start the relay again with another --data-dir"
                )
            used = {0, self._index}
            self._channels = [
                open_channel(address, security, _OPTIONS) for i, address in enumerate(addresses) if i in used
            ]
            self._address = addresses[self._index]
        return self._channels[min(index, 1, len(self._channels) - 1)]

    @contextmanager
    def _calling(self, index: int) -> Iterator[grpc.Channel]:
        try:
            yield self._channel(index)
        except ChannelError as error:
            raise SourceError(str(error)) from error
        except (DecodeError, ValueError) as error:
            self._hang_up()
            raise SourceError(f"{_UNREADABLE} an answer of {self._address} ({escaped(str(error))})") from error
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            refusal = details_of(error) if isinstance(error, grpc.RpcError) else None
            if isinstance(error, grpc.RpcError) and refusal is not None and refusal.reason is not None:
                why = escaped(error.details() or "")
                raise Rejected(refusal.reason, why, retry_seconds=refusal.retry_seconds) from error
            self._hang_up()
            told = explain(error, self._address) if isinstance(error, grpc.RpcError) else "the relay is stopping"
            raise SourceError(told) from error

    @contextmanager
    def _tracked(self, call: Any) -> Iterator[None]:
        with self._lock:
            self._calls.add(call)
            closed = self._closed
        if closed:
            call.cancel()
        try:
            yield
        finally:
            with self._lock:
                self._calls.discard(call)
            call.cancel()

    def _hang_up(self) -> None:
        channels, self._channels = self._channels, []
        for channel in channels:
            with suppress(Exception):
                channel.close()


def _require_answer(address: str, security: Security) -> None:
    """Raise :class:`SourceError` if a server does not answer: then nobody knows its shards."""
    with open_channel(address, security, _OPTIONS) as channel:
        try:
            stub = ParameterServerServiceStub(channel)
            stub.GetStatus(pb.GetStatusRequest(brief=True), timeout=_ANSWER_SECONDS)
        except grpc.RpcError as error:
            raise SourceError(explain(error, address)) from error


def question(
    known: Cut | None,
    fingerprint: bytes,
    run_state: pb.RunState.ValueType,
    dtype: ReaderType,
    name: str,
    seconds: float,
    relays: Sequence[str] = (),
) -> pb.AwaitCutRequest:
    """Return the question for a newer cut than the known one; ``relays`` are those that wait for the answer."""
    return pb.AwaitCutRequest(
        reader=name,
        known=[pb.ShardVersion(**each._asdict()) for each in known.shards] if known is not None else (),
        fingerprint=fingerprint,
        wait_seconds=seconds,
        version=known.version if known is not None else 0,
        run_state=run_state,
        buffers_digest=known.buffers_digest if known is not None else b"",
        reader_type=type_to_message(dtype),
        relays=relays,
    )
