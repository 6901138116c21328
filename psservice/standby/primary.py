"""The shard that a standby follows: one stream of questions, each with the standby's position, and their answers."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pscore.names import escaped
from pscore.net.channels import ChannelError, explain, open_channel
from pscore.net.moving import moving
from pscore.wire.errors import Rejected, details_of
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.relay.source import SourceError, addresses_of
from psservice.settings import ServerSettings
from psservice.storage.parts import HeldPart

REPLICATE = "/sparseps.v1.ParameterServerService/Replicate"

_FIND_SECONDS = 10.0
_WAIT_SECONDS = 1.0  # for something that follows
_IDLE_SECONDS = 10.0  # without a message, after which the stream is broken off
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 4 << 20),
)


@dataclass(frozen=True, slots=True)
class ReplicaAnswer:
    """An answer: its header, and the bytes that follow, which are to be read before the next question."""

    header: pb.ReplicaHeader
    data: Iterator[bytes]


class Primary:
    """One shard's connection to the shard that it stands by for; one thread asks, any may :meth:`close`."""

    def __init__(self, settings: ServerSettings, name: str) -> None:
        self._settings, self._name = settings, name
        self._channel: grpc.Channel | None = None
        self._call: Any = None
        self._asked: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers: Iterator[bytes] = iter(())
        self._lock = threading.Lock()
        self._is_closed = False
        self.address = settings.source

    def ask(self, held: HeldPart) -> ReplicaAnswer:
        """Tell the standby's position, and return the next part.

        Raises :class:`SourceError`, and :class:`Rejected` as the shard does; the next question begins a new stream.
        """
        return self._ask(
            pb.ReplicateRequest(
                standby=self._name,
                segment=held.position.segment,
                mark=held.mark,
                offset=held.position.offset,
                generation=held.generation,
                wait_seconds=_WAIT_SECONDS,
            )
        )

    def tell(self, successor: pb.ShardHistory) -> None:
        """Tell the shard of the history that has taken the place of its own; raises as :meth:`ask`."""
        self._ask(pb.ReplicateRequest(standby=self._name, successor=successor))

    def _ask(self, request: pb.ReplicateRequest) -> ReplicaAnswer:
        with self._translated():
            if self._call is None:
                self._open()
            self._asked.put(request.SerializeToString())
            first = self._next()
        header = first.header
        size = header.journal_bytes or header.manifest_bytes + header.tensors_bytes
        return ReplicaAnswer(header, self._data(size))

    def _data(self, size: int) -> Iterator[bytes]:
        left = size
        while left:
            with self._translated():
                data = self._next().data
                if not data or len(data) > left:
                    raise SourceError(f"{self.address} has sent other bytes than it announced")
            left -= len(data)
            yield data

    def _next(self) -> pb.ReplicateResponse:
        raw = next(self._answers, None)
        if raw is None:
            raise SourceError(f"{self.address} has ended the stream")
        return pb.ReplicateResponse.FromString(raw)

    def _open(self) -> None:
        if self._channel is None:
            addresses, security = addresses_of(self._settings, _FIND_SECONDS)
            if len(addresses) != self._settings.num_shards:
                raise SourceError(
                    f"{self._settings.source} is the address of {len(addresses)} shards, and this standby has "
                    f"{self._settings.num_shards}: name each shard of the server"
                )
            self.address = addresses[self._settings.shard_index]
            self._channel = open_channel(self.address, security, _OPTIONS)
        self._asked = queue.SimpleQueue()
        stream: Any = self._channel.stream_stream(REPLICATE)
        call = stream(iter(self._asked.get, None))
        with self._lock:
            self._call = call
            is_closed = self._is_closed
        if is_closed:
            call.cancel()
        self._answers = moving(call, _IDLE_SECONDS)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (SourceError, Rejected):
            self.hang_up()
            raise
        except ChannelError as error:
            self.hang_up()
            raise SourceError(str(error)) from error
        except DecodeError as error:
            self.hang_up()
            why = f"{self.address} has sent an answer that cannot be read: {escaped(str(error))}"
            raise SourceError(why) from error
        except grpc.RpcError as error:
            refusal = details_of(error)
            self.hang_up()
            if refusal.reason is not None:
                why = escaped(error.details() or "")
                raise Rejected(refusal.reason, why, retry_seconds=refusal.retry_seconds) from error
            raise SourceError(explain(error, self.address)) from error

    def hang_up(self) -> None:
        """End the stream and the channel, for the next question to find the shard anew."""
        with self._lock:
            call, self._call = self._call, None
        if call is not None:
            call.cancel()
            self._asked.put(None)
        channel, self._channel = self._channel, None
        if channel is not None:
            with suppress(Exception):
                channel.close()

    def close(self) -> None:
        """Break off a question that is under way, and every later one."""
        with self._lock:
            self._is_closed = True
            call = self._call
        if call is not None:
            call.cancel()
