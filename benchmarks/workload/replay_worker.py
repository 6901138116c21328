"""Workers that replay encoded messages, for load generators: torch is not imported, so that a process starts fast.

Streams of pushes and pulls stay open for the worker's life, and a small push is one message.
"""

import time
import uuid
from collections.abc import Sequence

import grpc
import grpc.aio

from pscore.net.proxies import NO_PROXY
from pscore.wire.v1 import parameter_server_pb2 as pb

CALL_SECONDS = 120.0
"""Longest time of one call."""

SERVICE = "/sparseps.v1.ParameterServerService"

_ONE_MESSAGE_BYTES = 3 << 20
_FRAMING_BYTES = 5  # gRPC's, of a message
_OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


class ReplayWorker:
    """One worker on a connection of its own that replays an encoded push and throws replies away; for an event loop.

    Nothing is encoded or decoded but headers: a worker then costs little of the machine that it shares with a server.

    Args:
        address: of a server with one shard, which has its model.
        name: of the worker.
        messages: a join request, then what :func:`~benchmarks.workload.raw_worker.push_messages` returns.

    Attributes:
        sent: message bytes of pushes; ``received`` those of replies, both with gRPC's framing.
        pushed: when the last push was answered, of :func:`time.monotonic`.
        staleness: of the last push.
    """

    def __init__(self, address: str, name: str, messages: Sequence[bytes]) -> None:
        self._channel = grpc.aio.insecure_channel(address, (*_OWN_CONNECTION, *NO_PROXY))
        self._join = pb.JoinRequest.FromString(messages[0])
        self._join.identity.worker_id, self._join.identity.incarnation = name, str(uuid.uuid4())
        self._push = pb.PushSparseRequest.FromString(messages[1])
        self._rest = messages[2:]
        self._pull = pb.PullDiffRequest(has_base=True, wait_seconds=CALL_SECONDS)
        self.sent = self.received = self.staleness = 0
        self.pushed = 0.0

    async def join(self) -> None:
        """Join; raises ``RuntimeError`` where the server has no model."""
        join = self._channel.unary_unary(
            f"{SERVICE}/Join", pb.JoinRequest.SerializeToString, pb.JoinResponse.FromString
        )
        joined = await join(self._join, timeout=CALL_SECONDS)
        if joined.state != pb.JOIN_STATE_READY:
            raise RuntimeError("the server has no model")
        identity = self._join.identity
        identity.run_id = joined.run_id
        for message in (self._push.header, self._pull):
            message.identity.CopyFrom(identity)
            message.generation, message.base_version = joined.generation, joined.version
        push, pull = f"{SERVICE}/PushSparse", f"{SERVICE}/PullDiff"
        self._pushes = self._channel.stream_stream(push)()
        self._pulls = self._channel.stream_stream(pull)()

    def load(self, messages: Sequence[bytes]) -> None:
        """Replay another push of the same groups from now on; messages as at first."""
        self._rest = messages[2:]

    async def push(self) -> None:
        """Push; returns when the server has applied it."""
        await self._write_push()
        self._push.header.base_version = self._note_answer(await self._pushes.read())

    async def exchange(self) -> None:
        """Push and pull, in one round trip: the request for the reply is sent ahead."""
        await self._write_push()
        self._pull.after_step = self._push.header.step
        await self._pulls.write(self._pull.SerializeToString())
        self._note_answer(await self._pushes.read())
        while not self._note(await self._pulls.read()):
            pass

    async def _write_push(self) -> None:
        """Send a small push as one message: messages that share no field but a repeated one join by their bytes."""
        self._push.header.step += 1
        messages = [self._push.SerializeToString(), *self._rest]
        if sum(map(len, messages)) < _ONE_MESSAGE_BYTES:
            messages = [b"".join(messages)]
        for message in messages:
            self.sent += len(message) + _FRAMING_BYTES
            await self._pushes.write(message)

    def _note_answer(self, message: bytes) -> int:
        """Read the answer to a push; return the version that it made."""
        answer = pb.PushSparseResponse.FromString(message)
        self.pushed, self.staleness = time.monotonic(), answer.staleness
        return answer.version

    def _note(self, message: bytes) -> bool:
        """Read what the next request must name; return whether the reply is whole."""
        self.received += len(message) + _FRAMING_BYTES
        reply = pb.PullDiffResponse.FromString(message)
        if reply.HasField("header"):
            self._push.header.base_version = self._pull.base_version = reply.header.version
            self._pull.acknowledged_reply, self._pull.image = reply.header.reply_number, reply.header.image
        return reply.HasField("commit")

    async def leave(self) -> None:
        """End the lease and the connection."""
        leave = self._channel.unary_unary(f"{SERVICE}/Leave", pb.LeaveRequest.SerializeToString)
        await leave(pb.LeaveRequest(identity=self._join.identity), timeout=CALL_SECONDS)
        await self._channel.close()
