"""A worker's upload of the model: as long as it takes, and where a call is cut, behind what has come."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import grpc

from psclient.model.replica import Replica
from psclient.rpc.channel import RetryPolicy
from psclient.rpc.shard import ShardClient
from psclient.rpc.stall import Outgoing, Watch
from pscore.model.layout import Span
from pscore.wire import frames
from pscore.wire.errors import Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb

UploadCall: TypeAlias = "grpc._CallFuture[pb.UploadModelResponse]"

_CHUNK_BYTES = 256 << 10
"""Largest payload of a message here: what one second brings on a line of 2 Mbit/s, and what a cut loses at most."""

_PIECE_ELEMENTS = 4 << 20  # that are copied to the host, as fp32, at a time


class ModelUpload:
    """One shard's range of the model, and for shard 0 the buffers, on their way.

    Args:
        shard: where to.
        header: of each call.
        replica: the model.
        buffers: the buffers, packed.
        chunk_bytes: the largest payload of a message.
        moved: told, at each message that goes, of the elements that have gone until then, and of its bytes.

    Attributes:
        is_sent: whether all of it has been handed to the transport, in one of its calls.
    """

    def __init__(
        self,
        shard: ShardClient,
        header: pb.UploadHeader,
        replica: Replica,
        buffers: bytes,
        chunk_bytes: int,
        moved: Callable[[int, int], None],
    ) -> None:
        """Send nothing yet."""
        self._shard, self._header, self._replica, self._moved = shard, header, replica, moved
        self._buffers, self._chunk_bytes = buffers, min(chunk_bytes, _CHUNK_BYTES)
        self.is_sent = False

    def send(self, patience: RetryPolicy) -> pb.UploadModelResponse | Rejected:
        """Send all that has not come yet; return the server's answer.

        Raises:
            SparsepsError: nothing has moved within the patience, or the server does not let this worker in.
        """
        shard = self._shard
        header = pb.UploadModelRequest(header=self._header)

        def look(seconds: float) -> UploadCall:
            return shard.connection.stub.UploadModel.future(iter((header,)), timeout=seconds)

        def send(looking: UploadCall) -> pb.UploadModelResponse:
            received = looking.result()
            watch = shard.outgoing = Watch(patience.timeout, patience.limit)
            stream = Outgoing(self._messages(received, patience), watch)
            call = watch.follow(shard.connection.stub.UploadModel.future(stream))
            with shard.connection.tracked(call):
                return watch.result(call)

        return shard.connection.ask(patience, look, send)

    def _messages(self, received: pb.UploadModelResponse, patience: RetryPolicy) -> Iterator[pb.UploadModelRequest]:
        """Yield what is still to be sent; everything, where what has come is not the beginning of this model."""
        yield pb.UploadModelRequest(header=self._header)
        checksum, chunks = self._behind(received.received)
        has_bytes = received.received_buffer_bytes if checksum.entries else 0
        for chunk in chunks:
            checksum.add(chunk)
            message = pb.UploadModelRequest(chunk=chunk)
            yield message
            patience.progressed()
            self._moved(checksum.entries, frames.wire_bytes(message))
        for piece in frames.encode_bytes(self._buffers, self._chunk_bytes):
            if piece.offset >= has_bytes:
                yield pb.UploadModelRequest(buffers=piece)
        self.is_sent = True
        yield pb.UploadModelRequest(commit=checksum.commit())

    def _behind(self, received: pb.Commit) -> tuple[frames.Checksum, Iterator[pb.Chunk]]:
        """Return the chunks behind those that have come, and the checksum up to there."""
        checksum, chunks = frames.Checksum(), self._chunks()
        while checksum.entries < received.entries and (chunk := next(chunks, None)) is not None:
            checksum.add(chunk)
        return (checksum, chunks) if checksum.commit() == received else (frames.Checksum(), self._chunks())

    def _chunks(self) -> Iterator[pb.Chunk]:
        span = self._shard.span
        for start in range(span.start, span.end, _PIECE_ELEMENTS):
            for segment in self._replica.read(Span(start, min(span.end, start + _PIECE_ELEMENTS))):
                for chunk, _ in frames.encode(segment, chunk_bytes=self._chunk_bytes):
                    yield chunk
