"""The call of a standby to the shard that it stands by for, and the one that only a standby answers."""

from collections.abc import Iterator

from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.awaiting import RECORDS, NotYetError
from psservice.rpc.calls import Call
from psservice.shard.join import hear_of_successor
from psservice.shard.shard import Shard
from psservice.storage.journal import Position
from psservice.storage.parts import HeldPart, JournalPart, SnapshotPart

_DATA_BYTES = 1 << 20  # of one message
_AGAIN_SECONDS = 1.0  # after which a waiting call is answered in any case, so that both sides know of each other


class StandbyCalls:
    """The calls of standbys over one shard; each method serves the call that it is named after."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def replicate(self, call: Call, request: pb.ReplicateRequest) -> Iterator[bytes]:
        """Note a standby's position, and send it the next part, once there is one; called on the event loop."""
        shard, durability = self._shard, self._shard.durability
        if request.HasField("successor"):
            return self._hear_of_successor(request)
        held = HeldPart(Position(request.segment, request.offset), bytes(request.mark), request.generation)
        durability.replication.hear(request.standby, held)

        def follows() -> bool:
            return durability.lacks(held)

        if not (call.is_late or durability.must_compare(held) or follows()):
            call.wait_seconds = min(call.wait_seconds, _AGAIN_SECONDS) or _AGAIN_SECONDS
            raise NotYetError(ErrorCode.BUSY, "nothing follows", follows, pusher=lambda: RECORDS)
        return self._answer(shard, held)

    def _hear_of_successor(self, request: pb.ReplicateRequest) -> Iterator[bytes]:
        """Learn that a standby serves in this shard's place, and write that down before the answer."""
        self._shard.durability.replication.forget()
        hear_of_successor(self._shard, request.successor)
        yield pb.ReplicateResponse(header=self._header(Position(), 0)).SerializeToString()

    def _answer(self, shard: Shard, held: HeldPart) -> Iterator[bytes]:
        version = shard.model.version if shard.model is not None else 0  # first: the standby has it if it has the rest
        newest = shard.durability.newest_position()
        part = shard.durability.next_part(held)
        replication = shard.durability.replication
        replication.answer(newest, version)
        if not isinstance(part, SnapshotPart):
            replication.compared(held)
        header = self._header(newest, version)
        if isinstance(part, SnapshotPart):
            try:
                yield from _snapshot(header, part)
            finally:
                part.close()
            return
        header.segment, header.offset = held.position
        if isinstance(part, JournalPart):
            (header.segment, header.offset), header.journal_bytes = part.begin, len(part.data)
        yield pb.ReplicateResponse(header=header).SerializeToString()
        if isinstance(part, JournalPart):
            yield from _pieces(part.data)

    def _header(self, newest: Position, version: int) -> pb.ReplicaHeader:
        return pb.ReplicaHeader(
            version=version,
            newest_segment=newest.segment,
            newest_offset=newest.offset,
            acknowledged=self._shard.durability.replication.is_required,
        )

    def promote(self, call: Call, request: pb.PromoteRequest) -> pb.PromoteResponse:
        """Refuse: this server serves already."""
        raise Rejected(ErrorCode.BAD_REQUEST, "this server is no standby: it serves already")


def _snapshot(header: pb.ReplicaHeader, part: SnapshotPart) -> Iterator[bytes]:
    header.segment, header.offset = part.begin
    header.manifest_bytes, header.tensors_bytes = part.manifest_bytes, part.tensors_bytes
    header.continues = part.continues
    yield pb.ReplicateResponse(header=header).SerializeToString()
    for file in (part.manifest, part.tensors):
        while data := file.read(_DATA_BYTES):
            yield pb.ReplicateResponse(data=data).SerializeToString()


def _pieces(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), _DATA_BYTES):
        yield pb.ReplicateResponse(data=data[start : start + _DATA_BYTES]).SerializeToString()
