"""The calls of operators: status, end of the run, snapshots, rollback, drain, eviction."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import BinaryIO

from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.rpc.calls import ANSWER_BYTES, Call
from psservice.rpc.status import status_of
from psservice.shard import rollback
from psservice.shard.join import evict
from psservice.shard.lifecycle import finish
from psservice.shard.shard import Shard

_BATCHES = 2  # of a checkpoint's pieces: one is sent while the next is read


class OperatorCalls:
    """The calls of operators over one shard; each method serves the call that it is named after.

    ``queued`` counts pushes and pulls at work, or waiting for a thread. ``on_drain`` is called after the shard was
    closed or opened; ``stop`` ends the process as SIGTERM does, without waiting for that. The uptime counts from here.
    """

    def __init__(
        self, shard: Shard, queued: Callable[[], int], on_drain: Callable[[], None], stop: Callable[[], None]
    ) -> None:
        self._shard, self._queued, self._on_drain, self._stop = shard, queued, on_drain, stop
        self._started = time.monotonic()

    def status(self, *, brief: bool = False) -> pb.GetStatusResponse:
        """Return the status, also for the status page."""
        return status_of(self._shard, time.monotonic() - self._started, self._queued(), brief=brief)

    def get_status(self, call: Call, request: pb.GetStatusRequest) -> pb.GetStatusResponse:
        """Report."""
        return self.status(brief=request.brief)

    def finish_run(self, call: Call, request: pb.FinishRunRequest) -> pb.FinishRunResponse:
        """End the run."""
        shard = self._shard
        self._require_no_relay("ended")
        shard.run.require_id(request.run_id, may_be_empty=True)
        call.audit = None if shard.run.is_finished else {"run": shard.run.run_id}
        path = finish(shard)
        return pb.FinishRunResponse(version=shard.require_model(None).version, final_model=path)

    def _require_no_relay(self, what: str) -> None:
        """Refuse a call that changes the run if this is a relay: its versions are those of its source."""
        source = self._shard.settings.relay_of
        if source:
            why = f"this server relays {source}, and goes where that goes: a run is {what} there"
            raise Rejected(ErrorCode.BAD_REQUEST, why)

    def take_snapshot(self, call: Call, request: pb.TakeSnapshotRequest) -> pb.TakeSnapshotResponse:
        """Take a snapshot."""
        call.audit = {"checkpoint": request.checkpoint}
        snapshot = self._shard.durability.take_asked(request.checkpoint)
        manifest = snapshot.manifest
        call.audit = {"checkpoint": manifest.checkpoint, "version": manifest.version}
        return pb.TakeSnapshotResponse(
            checkpoint=manifest.checkpoint, version=manifest.version, path=str(snapshot.path)
        )

    def list_checkpoints(self, call: Call, request: pb.ListCheckpointsRequest) -> pb.ListCheckpointsResponse:
        """Report the snapshots."""
        kept = [(each.manifest, each.is_pinned) for each in self._shard.durability.snapshots()]
        return pb.ListCheckpointsResponse(
            checkpoints=[
                pb.CheckpointStatus(
                    checkpoint=each.checkpoint,
                    version=each.version,
                    created_unix_seconds=each.created_unix_seconds,
                    bytes=each.tensors.bytes if each.tensors else 0,
                    named=each.is_named,
                    pinned=is_pinned,
                )
                for each, is_pinned in kept
            ]
        )

    def pin_checkpoint(self, call: Call, request: pb.PinCheckpointRequest) -> pb.PinCheckpointResponse:
        """Keep a checkpoint."""
        call.audit = {"checkpoint": request.checkpoint}
        return pb.PinCheckpointResponse(version=self._shard.durability.pin(request.checkpoint).manifest.version)

    def read_checkpoint(self, call: Call, request: pb.ReadCheckpointRequest) -> Iterator[pb.ReadCheckpointResponse]:
        """Send the files of a checkpoint."""
        call.audit = {"checkpoint": request.checkpoint}
        shard, piece_bytes = self._shard, self._shard.settings.chunk_bytes
        with shard.memory.answer() as reservation, ExitStack() as opened:
            reservation.add(_BATCHES * (ANSWER_BYTES + piece_bytes))
            files = shard.durability.open(request.checkpoint)
            for _, _, file in files:
                opened.enter_context(file)
            for name, size, file in files:
                yield pb.ReadCheckpointResponse(file=pb.CheckpointFile(name=name, bytes=size))
                left = size
                while left:
                    data = _read(file, min(left, piece_bytes))
                    yield pb.ReadCheckpointResponse(data=data)
                    left -= len(data)

    def delete_checkpoint(self, call: Call, request: pb.DeleteCheckpointRequest) -> pb.DeleteCheckpointResponse:
        """Delete a checkpoint that an operator has named or pinned."""
        call.audit = {"checkpoint": request.checkpoint}
        return pb.DeleteCheckpointResponse(version=self._shard.durability.delete(request.checkpoint).manifest.version)

    def restore_model(self, call: Call, request: pb.RestoreModelRequest) -> pb.RestoreModelResponse:
        """Take the shard back to a version or a checkpoint, or do one step of that."""
        shard = self._shard
        self._require_no_relay("taken back")
        if request.step in (pb.RESTORE_STEP_COMMIT, pb.RESTORE_STEP_ABANDON):
            step = rollback.commit if request.step == pb.RESTORE_STEP_COMMIT else rollback.abandon
            done = step(shard, request.ticket)
            name = {"checkpoint": done.checkpoint} if done.checkpoint else {}
            is_committed = request.step == pb.RESTORE_STEP_COMMIT
            call.audit = {**name, "version": done.version} if is_committed else None
            return pb.RestoreModelResponse(version=done.version, generation=done.generation)
        target = request.WhichOneof("target")
        if target is None:
            raise Rejected(ErrorCode.BAD_REQUEST, "name a version or a checkpoint to go back to")
        version = request.version if target == "version" else None
        call.audit = {target: getattr(request, target)}
        if request.step == pb.RESTORE_STEP_UNSPECIFIED:
            model = rollback.roll_back(shard, version, request.checkpoint)
            return pb.RestoreModelResponse(version=model.version, generation=model.generation)
        if request.step == pb.RESTORE_STEP_CHECK:
            model, call.audit = rollback.check(shard, version, request.checkpoint, request.publication), None
            publication = model.publication_at(model.version)
            return pb.RestoreModelResponse(version=model.version, generation=model.generation, publication=publication)
        if request.step != pb.RESTORE_STEP_PREPARE:
            raise Rejected(ErrorCode.BAD_REQUEST, f"{request.step} is no step that this server knows")
        ready = rollback.prepare(shard, version, request.checkpoint, request.publication)
        call.audit = None
        return pb.RestoreModelResponse(
            version=ready.version,
            generation=ready.generation,
            ticket=ready.ticket,
            publication=ready.publication,
        )

    def drain(self, call: Call, request: pb.DrainRequest) -> pb.DrainResponse:
        """Close the shard to new changes, or open it again."""
        shard, gate = self._shard, self._shard.drain_gate
        was_closed = gate.is_closed
        match request.action:
            case pb.DRAIN_ACTION_CLOSE | pb.DRAIN_ACTION_STOP:
                gate.is_closed = True
            case pb.DRAIN_ACTION_OPEN:
                gate.is_closed = False
            case _:
                raise Rejected(ErrorCode.BAD_REQUEST, f"{request.action} is no action that this server knows")
        if gate.is_closed is not was_closed:  # an operator asks again and again until the shard is drained
            call.audit = {"act": "close" if gate.is_closed else "open"}
        shard.leases.waiters.wake()
        self._on_drain()
        inside = gate.in_flight
        stopping = request.action == pb.DRAIN_ACTION_STOP and not inside
        if stopping:
            call.audit = {"act": "stop"}
            self._stop()
        return pb.DrainResponse(
            draining=gate.is_closed,
            calls_inside=inside,
            queued=self._queued(),
            version=shard.model.version if shard.model else 0,
            stopping=stopping,
        )

    def evict_worker(self, call: Call, request: pb.EvictWorkerRequest) -> pb.EvictWorkerResponse:
        """End a worker's lease."""
        shard = self._shard
        call.audit = {"worker": request.worker_id, "ban_seconds": request.ban_seconds}
        member = evict(shard, request.worker_id, request.ban_seconds)
        _, last_step = shard.state.pushes.last(request.worker_id) or ("", 0)
        return pb.EvictWorkerResponse(
            had_lease=member is not None,
            incarnation=member.identity.incarnation if member else "",
            last_step=last_step,
        )


def _read(file: BinaryIO, nbytes: int) -> bytes:
    """Read the next bytes of a checkpoint's file; raises :class:`Rejected` (``NOT_DURABLE``)."""
    try:
        data = file.read(nbytes)
    except OSError as error:
        raise Rejected(ErrorCode.NOT_DURABLE, f"the checkpoint cannot be read: {error}") from error
    if not data:
        raise Rejected(ErrorCode.NOT_DURABLE, "a file of the checkpoint has become shorter while it was read")
    return data
