"""A worker's upload of the model: as long as its bytes move, and after a cut from where the server has the rest."""

from collections.abc import Callable, Iterator

import grpc

from psclient.model.replica import Replica
from psclient.rpc.channel import RetryPolicy
from psclient.rpc.shard import ShardClient
from psclient.rpc.stall import StreamCall
from pscore.model.layout import Span
from pscore.wire import frames
from pscore.wire.errors import Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb

_CHUNK_BYTES = 256 << 10  # what one second brings on a line of 2 Mbit/s, and what a cut loses at most
_PIECE_ELEMENTS = 4 << 20  # that are copied to the host, as fp32, at a time


class ModelUpload:
    """One shard's range of the model, and for shard 0 the packed buffers.

    ``moved`` is called for each message with the elements sent until then, and the message's bytes. ``is_sent`` tells
    whether all has been given to the transport in one call.
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
        self._shard, self._header, self._replica, self._moved = shard, header, replica, moved
        self._buffers, self._chunk_bytes = buffers, min(chunk_bytes, _CHUNK_BYTES)
        self.is_sent = False

    def send(self, policy: RetryPolicy) -> pb.UploadModelResponse | Rejected:
        """Send all that the server does not have yet; return its answer."""
        shard = self._shard
        header = pb.UploadModelRequest(header=self._header)

        def ask(seconds: float) -> "grpc._CallFuture[pb.UploadModelResponse]":
            return shard.connection.stub.UploadModel.future(iter((header,)), timeout=seconds)

        def send(asked: "grpc._CallFuture[pb.UploadModelResponse]") -> pb.UploadModelResponse:
            messages = self._messages(asked.result(), policy)
            call = shard.outgoing = StreamCall(policy.timeout, policy.limit)
            call.start(shard.connection.stub.UploadModel.future(call.outgoing(messages)))
            with shard.connection.tracked(call):
                answer: pb.UploadModelResponse = call.result()
                return answer

        return shard.connection.call(policy, ask, send)

    def _messages(self, received: pb.UploadModelResponse, policy: RetryPolicy) -> Iterator[pb.UploadModelRequest]:
        """Yield what is still to be sent; everything, where the server has not the beginning of this model."""
        yield pb.UploadModelRequest(header=self._header)
        checksum, chunks = frames.Checksum(), self._chunks()
        while checksum.entries < received.received.entries and (chunk := next(chunks, None)) is not None:
            checksum.add(chunk)
        if checksum.commit() != received.received:
            checksum, chunks = frames.Checksum(), self._chunks()
        has_bytes = received.received_buffer_bytes if checksum.entries else 0
        for chunk in chunks:
            checksum.add(chunk)
            message = pb.UploadModelRequest(chunk=chunk)
            yield message
            policy.progressed()
            self._moved(checksum.entries, frames.wire_bytes(message))
        for piece in frames.encode_bytes(self._buffers, self._chunk_bytes):
            if piece.offset >= has_bytes:
                yield pb.UploadModelRequest(buffers=piece)
        self.is_sent = True
        yield pb.UploadModelRequest(commit=checksum.commit())

    def _chunks(self) -> Iterator[pb.Chunk]:
        span = self._shard.span
        for start in range(span.start, span.end, _PIECE_ELEMENTS):
            for segment in self._replica.read(Span(start, min(span.end, start + _PIECE_ELEMENTS))):
                for chunk, _ in frames.encode(segment, chunk_bytes=self._chunk_bytes):
                    yield chunk
