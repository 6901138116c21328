"""What every call of the service goes through: who calls, whether it may, and what a refusal becomes."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import grpc

from pscore.messages import SHARD_HEADER, place_of
from pscore.reasons import Reason, Refusal
from pscore.v1 import parameter_server_pb2 as pb
from psservice.engine import Engine
from psservice.identities import identity_from_message, require_name
from psservice.membership import Identity, Member
from psservice.refusals import refusals_as_status
from psservice.security import Caller, Gate, require_worker


class CallBase:
    """The part of the service that its rooms share.

    Args:
        engine: the shard.
        gate: who is let in.
    """

    def __init__(self, engine: Engine, gate: Gate) -> None:
        """Serve this engine to whom the gate admits."""
        self._engine, self._gate = engine, gate
        self._settings = engine.settings
        self._metrics = engine.metrics

    @contextmanager
    def _admitted(self, context: grpc.ServicerContext, rpc: str, *, changes: bool = False) -> Iterator[Caller]:
        """Let the caller in, or refuse; and turn every refusal inside into a status.

        A call that ``changes`` the shard is one that a drain waits for.
        """
        entered = self._engine.doorway.entered() if changes else nullcontext()
        with refusals_as_status(context, self._metrics, rpc):
            metadata = context.invocation_metadata()
            caller = self._gate.admit(metadata, rpc)
            for key, value in metadata:
                if key == SHARD_HEADER:
                    self._require_place(str(value))
            with entered:
                yield caller

    def _require_place(self, meant: str) -> None:
        """Refuse a call that is meant for another shard: its address may have been another's a moment ago."""
        settings = self._engine.settings
        mine = place_of(settings.shard_index, settings.num_shards)
        if meant != mine:
            raise Refusal(
                Reason.SHARD_MISMATCH, f"the worker takes this server for shard {meant[:32]}; it is shard {mine}"
            )

    def _identity(self, caller: Caller, message: pb.WorkerIdentity, *, any_run: bool = False) -> Identity:
        for what, text in (
            ("worker_id", message.worker_id),
            ("incarnation", message.incarnation),
            ("run_id", message.run_id or "-"),
        ):
            require_name(what, text)
        require_worker(caller, message.worker_id)
        if not any_run:
            self._engine.run.require_id(message.run_id)
        return identity_from_message(message)

    def _count(self, rpc: str, member: Member | None, *, received: int = 0, sent: int = 0) -> None:
        self._engine.traffic.count(rpc, received + sent)
        self._metrics.received_bytes.labels(rpc=rpc).inc(received)
        self._metrics.sent_bytes.labels(rpc=rpc).inc(sent)
        if member is not None:
            member.push_bytes += received
            member.pull_bytes += sent
