"""The calls of operators: looking, ending the run, snapshots, going back, draining, evicting.

Everything that comes from outside is checked before anything is done.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.rpc import bounds
from psservice.rpc.calls import Call, Handler
from psservice.rpc.identity import require_name
from psservice.rpc.status import StatusReport
from psservice.shard.join import evict
from psservice.shard.lifecycle import finish
from psservice.shard.model_install import roll_back
from psservice.shard.shard import Shard


@dataclass(frozen=True, slots=True)
class Process:
    """What an operator's call does to the process around the shard.

    Attributes:
        doorway_changed: called after the shard was closed or opened.
        stop: ends the process as SIGTERM does, without waiting for that.
    """

    doorway_changed: Callable[[], None]
    stop: Callable[[], None]


class OperatorCalls:
    """The calls of operators over one engine.

    Args:
        engine: the shard.
        process: told when the shard is drained; ``None`` where there is no process of its own around it.

    Attributes:
        report: the status as a message.
    """

    def __init__(self, engine: Shard, process: Process | None = None) -> None:
        """Report on this engine."""
        self._engine = engine
        self.report = StatusReport(engine)
        self._process = process or Process(lambda: None, lambda: None)

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers by the method's name."""
        return {
            "GetStatus": self.get_status,
            "FinishRun": self.finish_run,
            "TakeSnapshot": self.take_snapshot,
            "ListCheckpoints": self.list_checkpoints,
            "DeleteCheckpoint": self.delete_checkpoint,
            "RestoreModel": self.restore_model,
            "Drain": self.drain,
            "EvictWorker": self.evict_worker,
        }

    def get_status(self, call: Call, request: pb.GetStatusRequest) -> pb.GetStatusResponse:
        """Report."""
        return self.report.message(brief=request.brief)

    def finish_run(self, call: Call, request: pb.FinishRunRequest) -> pb.FinishRunResponse:
        """End the run."""
        engine = self._engine
        require_name("run_id", request.run_id or "-")
        engine.run.require_id(request.run_id, may_be_empty=True)
        path = finish(engine)
        return pb.FinishRunResponse(version=engine.require_model(None).version, final_model=path)

    def take_snapshot(self, call: Call, request: pb.TakeSnapshotRequest) -> pb.TakeSnapshotResponse:
        """Take a snapshot."""
        require_name("checkpoint", request.checkpoint or "-")
        snapshot = self._engine.durability.take_asked(self._engine, request.checkpoint)
        manifest = snapshot.manifest
        return pb.TakeSnapshotResponse(
            checkpoint=manifest.checkpoint, version=manifest.version, path=str(snapshot.path)
        )

    def list_checkpoints(self, call: Call, request: pb.ListCheckpointsRequest) -> pb.ListCheckpointsResponse:
        """Report the snapshots."""
        manifests = [each.manifest for each in self._engine.durability.snapshots()]
        return pb.ListCheckpointsResponse(
            checkpoints=[
                pb.CheckpointStatus(
                    checkpoint=each.checkpoint,
                    version=each.version,
                    created_unix_seconds=each.created_unix_seconds,
                    bytes=each.tensors.bytes if each.tensors else 0,
                    named=each.is_named,
                )
                for each in manifests
            ]
        )

    def delete_checkpoint(self, call: Call, request: pb.DeleteCheckpointRequest) -> pb.DeleteCheckpointResponse:
        """Delete a checkpoint that an operator has named."""
        require_name("checkpoint", request.checkpoint)
        return pb.DeleteCheckpointResponse(version=self._engine.durability.delete(request.checkpoint).manifest.version)

    def restore_model(self, call: Call, request: pb.RestoreModelRequest) -> pb.RestoreModelResponse:
        """Go back."""
        bounds.require(request)
        require_name("checkpoint", request.checkpoint or "-")
        target = request.WhichOneof("target")
        if target is None:
            raise Rejected(ErrorCode.BAD_REQUEST, "name a version or a checkpoint to go back to")
        model = roll_back(self._engine, request.version if target == "version" else None, request.checkpoint)
        return pb.RestoreModelResponse(version=model.version, generation=model.generation)

    def drain(self, call: Call, request: pb.DrainRequest) -> pb.DrainResponse:
        """Close the shard to what is new, or open it again."""
        engine, gate = self._engine, self._engine.drain_gate
        match request.action:
            case pb.DRAIN_ACTION_CLOSE | pb.DRAIN_ACTION_STOP:
                gate.close()
            case pb.DRAIN_ACTION_OPEN:
                gate.open()
            case _:
                raise Rejected(ErrorCode.BAD_REQUEST, f"{request.action} is no action that this server knows")
        self._process.doorway_changed()
        inside, queued = gate.in_flight, engine.writer.queued
        stopping = request.action == pb.DRAIN_ACTION_STOP and not inside and not queued
        if stopping:
            self._process.stop()
        return pb.DrainResponse(
            draining=gate.is_closed,
            calls_inside=inside,
            queued=queued,
            version=engine.model.version if engine.model else 0,
            stopping=stopping,
        )

    def evict_worker(self, call: Call, request: pb.EvictWorkerRequest) -> pb.EvictWorkerResponse:
        """End a worker's lease."""
        engine = self._engine
        require_name("worker_id", request.worker_id)
        bounds.require(request)
        member = evict(engine, request.worker_id, request.ban_seconds)
        _, last_step = engine.dedup.last_push(request.worker_id) or ("", 0)
        return pb.EvictWorkerResponse(
            had_lease=member is not None,
            incarnation=member.identity.incarnation if member else "",
            last_step=last_step,
        )
