"""A worker's side of the buffers: contribute to the server's average, take it over (docs/protocol.md, *Buffers*)."""

from collections.abc import Iterator

from psclient.errors import from_refusal
from psclient.model.module import NamedBuffers
from psclient.rpc.channel import RetryPolicy
from psclient.rpc.shard import REJOIN_REASONS, ShardClient
from pscore.model.buffers import is_exchanged, pack, packed_bytes, unpack
from pscore.wire import frames
from pscore.wire.errors import Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb


class BufferExchange:
    """The buffers that travel: floating-point ones and integer scalars.

    Args:
        buffers: every persistent buffer, in layout order; written in place.
    """

    def __init__(self, buffers: NamedBuffers) -> None:
        """Keep those that are exchanged."""
        self.buffers = buffers.only(is_exchanged)

    def run(
        self,
        coordinator: ShardClient,
        header: pb.BuffersHeader,
        patience: RetryPolicy,
        *,
        chunk_bytes: int,
        adopt: bool,
    ) -> int:
        """Send the buffers, receive the average, and write it over them if ``adopt``; return the message bytes moved.

        Where the lease or the model is lost, nothing is exchanged: the next pull joins again, the next period sends.

        Raises:
            ModelChangedError: a buffer is another one than it was.
            ServerUnreachableError: no answer within the patience.
        """
        tensors, specs = self.buffers.now(), self.buffers.specs
        data = pack(tensors)
        header.buffer_bytes = len(data)
        messages = [pb.ExchangeBuffersRequest(header=header)]
        messages += [pb.ExchangeBuffersRequest(buffers=piece) for piece in frames.encode_bytes(data, chunk_bytes)]
        moved = sum(frames.wire_bytes(message) for message in messages)

        def read(responses: Iterator[pb.ExchangeBuffersResponse]) -> bytes:
            nonlocal moved
            reader = frames.BytesReader(packed_bytes(specs), packed_bytes(specs))
            for response in responses:
                moved += frames.wire_bytes(response)
                reader.read(response.buffers)
            return reader.finish()

        connection = coordinator.connection
        average = connection.ask(
            patience, lambda seconds: connection.stub.ExchangeBuffers(iter(messages), timeout=seconds), read
        )
        if isinstance(average, Rejected):
            if average.reason in REJOIN_REASONS:
                return moved
            raise from_refusal(average) from None
        if adopt:
            for tensor, value in zip(tensors, unpack(average, specs), strict=True):
                tensor.copy_(value)
        return moved
