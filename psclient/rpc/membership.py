"""A worker's membership: joining every shard, uploading the model, keeping the leases, leaving.

The rules are those of docs/protocol.md, *Joining*; this file is where a worker follows them.
"""

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import grpc

from psclient.errors import (
    START_FIRST,
    STEP_AGAIN,
    ConfigurationError,
    RefusedError,
    ServerNotReadyError,
    ServerUnreachableError,
    Transient,
    from_refusal,
    from_rpc_error,
)
from psclient.executor import is_cancelled
from psclient.model.module import NamedBuffers
from psclient.model.replica import Replica
from psclient.rpc.channel import HANDSHAKE_SECONDS, RetryPolicy, pause, suppress_errors
from psclient.rpc.heartbeat import LeaseThread
from psclient.rpc.progress_line import WaitLine
from psclient.rpc.shard import REJOIN_REASONS, ShardClient
from psclient.rpc.upload import ModelUpload
from psclient.settings import ClientSettings
from pscore.model.buffers import pack
from pscore.names import shown
from pscore.wire.codecs.names import (
    INDEX_CODECS,
    PLAIN_INDEX_CODECS,
    PLAIN_VALUE_CODECS,
    READABLE_INDEX_CODECS,
    READABLE_VALUE_CODECS,
    VALUE_CODECS,
)
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.generation import epoch, sibling_generation
from pscore.wire.messages import PROTOCOL_VERSION, layout_to_message
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub

log = logging.getLogger("psclient")

_LEAVING_SECONDS = 2.0
_FIRST_DEADLINE_SECONDS = 5.0  # before the first contact: a wrong address should be said soon
_LONGEST_PAUSE_SECONDS = 2.0  # between two looks at another worker's upload


class Membership:
    """One worker's place in a run, at all of its shards.

    Args:
        shards: every shard's client, in order.
        worker_id: this worker's name.
        replica: the model, for uploads.
        buffers: the model's persistent buffers, in layout order.
        method: name of the training method.
        method_settings: settings in which workers must agree.
        settings: time limits and forms.

    Attributes:
        identity: what every call carries.
        leases: renews them from the first join on.
        run_settings: what the coordinator handed out.
        live_workers: workers alive, as last heard.
        run_finished: whether the run is over, as last heard.
        first_step: the lowest number that the next step should have, as said at the last join.
        joins: how often it has joined; after another time, what it held before may be others'.
        last_push_record: (incarnation, step) of the last push that the coordinator knew under this name at the first
            join.
    """

    def __init__(
        self,
        shards: Sequence[ShardClient],
        worker_id: str,
        replica: Replica,
        buffers: NamedBuffers,
        method: str,
        method_settings: Mapping[str, str],
        settings: ClientSettings,
    ) -> None:
        """Prepare; :meth:`join` makes the first contact."""
        self.settings = settings
        self.shards = tuple(shards)
        self.identity = pb.WorkerIdentity(run_id=settings.run_id, worker_id=worker_id, incarnation=str(uuid.uuid4()))
        self.run_settings = pb.RunSettings()
        self.live_workers = 0
        self.run_finished = False
        self.first_step = 0
        self.last_push_record: tuple[str, int] | None = None
        self._run_id = settings.run_id
        self._replica = replica
        self._buffers = buffers
        self._method = method
        self._method_settings = dict(method_settings)
        self._joined = False
        self._has_asked = False
        self._loaded: pb.LoadedModel | None = None  # what is offered in the place of the server's model
        self._load_refused = False
        self.version = 0  # of shard 0, as said at the last join
        self._moved = 0.0  # when a model was last seen to get on, while joining
        self.joins = 0
        self._joining = threading.Lock()
        self.leases = LeaseThread(self.shards, self.identity)
        self._hurry_until = math.inf
        self.upload_bytes = 0
        """Message bytes of models sent."""

    @property
    def coordinator(self) -> ShardClient:
        """Shard 0."""
        return self.shards[0]

    @property
    def _has_replica(self) -> bool:
        return all(shard.has_base for shard in self.shards)

    def hurry(self, seconds: float) -> None:
        """Wait no longer than this from now on; a worker that is told to stop has little time."""
        self._hurry_until = min(self._hurry_until, time.monotonic() + seconds)
        shorter = min(seconds, self.settings.patience_seconds)
        self.settings = self.settings.model_copy(
            update={"patience_seconds": shorter, "deadline_seconds": min(shorter, self.settings.deadline_seconds)}
        )
        for shard in self.shards:
            shard.settings = self.settings

    @property
    def seconds_left(self) -> float | None:
        """How much longer a server may be waited for; ``None`` without :meth:`hurry`."""
        return None if math.isinf(self._hurry_until) else max(0.0, self._hurry_until - time.monotonic())

    def patience(self, shard: ShardClient, seconds: float | None = None) -> RetryPolicy:
        """Return the patience for an undertaking at one shard."""
        return RetryPolicy(
            shard.address,
            self.settings.patience_seconds if seconds is None else seconds,
            self.settings.deadline_seconds
            if self.leases.is_started
            else min(_FIRST_DEADLINE_SECONDS, self.settings.deadline_seconds),
            STEP_AGAIN if self._joined else START_FIRST,
            limit=lambda: self._hurry_until,
            reconnect=shard.connection.reconnect,
            handshake_seconds=math.inf if self._joined else HANDSHAKE_SECONDS,  # later, a server is being set up anew
        )

    def join(self, loaded: pb.LoadedModel | None = None) -> bool:
        """Join every shard, upload the model if this worker is to, and return once every shard has it.

        Args:
            loaded: offers the worker's model in the place of the server's.

        Returns:
            Whether it takes that place, or the server's began as it; without an offer it says nothing.

        Raises:
            SparsepsError: unreachable, another model, another method, a living worker of the same name.
        """
        with self._joining:  # a push, a fetch and a sampler may find out in three threads that they must
            self._loaded = loaded
            try:
                self._join()
            finally:
                self._loaded = None
            self.joins += 1
            return not self._load_refused

    def _join(self) -> None:
        seconds = self.settings.patience_seconds if self._joined else self.settings.connect_seconds
        self._moved = time.monotonic()
        if self._joined and self._loaded is None:
            for shard in self.shards:
                shard.connection.renew()
        with WaitLine() as line:
            while not self._try_join(seconds, line):
                if time.monotonic() > min(self._moved + seconds, self._hurry_until):
                    raise ServerNotReadyError(
                        f"{self.coordinator.address} has had no model for {seconds:.0f} s, and no worker that uploads "
                        "one has got any further; check whether one lives, or restart all shards together"
                    )
        if not self._joined:
            self._joined = True
            self._say_joined()

    def _say_joined(self) -> None:
        """Tell the log, once, where this worker is and whose parameters it trains."""
        uploaded = self.coordinator.has_base
        run, version = shown(self.identity.run_id), self.version
        what = "its model was uploaded" if uploaded else "the server's parameters are taken over"
        log.info(
            "worker %s has joined run %s at %s, version %d: %s",
            self.identity.worker_id,
            run,
            ",".join(shard.address for shard in self.shards),
            version,
            what,
        )
        if self.run_finished:
            log.warning(
                "run %s is finished, at version %d: nothing more is trained here; for another run start a server with "
                "another --data-dir, or without one",
                run,
                version,
            )

    def _wanted_codecs(self) -> list["pb.IndexCodec.ValueType"]:
        """Return the index codecs for replies: what can be read, or the one that the settings name."""
        chosen = INDEX_CODECS.get(self.settings.index_codec)
        if chosen is None:
            return [*READABLE_INDEX_CODECS]
        return [pb.INDEX_CODEC_DENSE, cast("pb.IndexCodec.ValueType", chosen)]

    def _try_join(self, seconds: float, line: WaitLine) -> bool:
        answers = [self._join_shard(shard, seconds) for shard in reversed(self.shards[1:])]
        known = [shard.generation for shard in self.shards]
        seen = max(*known, *(answer.generation for answer in answers), 0)
        first = self._join_shard(self.coordinator, seconds, generation_seen=seen)
        if self.identity.run_id != first.run_id and self._joined:
            log.warning("the server now serves run %s; going on there", shown(first.run_id))
        self.identity.run_id = first.run_id
        self.run_settings = first.settings
        self.leases.renewal_seconds = max(0.1, first.settings.lease_seconds / 3)
        self.leases.start()
        self.live_workers = first.live_workers
        self.run_finished = first.run_state == pb.RUN_STATE_FINISHED
        self.first_step, self.version = first.first_step, first.version
        self._load_refused = first.load_refused
        if not self._joined:
            self.last_push_record = (first.last_incarnation, first.last_step) if first.last_step else None
        trained_elsewhere = any(answer.state == pb.JOIN_STATE_READY and answer.version for answer in answers)
        if first.state == pb.JOIN_STATE_UPLOAD and trained_elsewhere and not self._has_replica:
            # Fresh weights must not replace trained ones: wait for a worker that has a replica.
            self._pause(first.retry_seconds)
            return False
        if first.state == pb.JOIN_STATE_UPLOAD:
            done = all(
                self._has_uploaded(shard, answer, first.generation) or self._upload(shard, first.generation, line)
                for shard, answer in zip(reversed(self.shards), (*answers, first), strict=True)
            )
            if not done:
                self._pause(first.retry_seconds)
            return done
        if first.state != pb.JOIN_STATE_READY:
            self._await_upload(first, line)
            return False
        now = epoch(first.generation)
        for shard, answer in zip(self.shards, (first, *reversed(answers)), strict=True):
            if answer.state == pb.JOIN_STATE_READY and epoch(answer.generation) == now:
                shard.adopt(answer.generation)
            elif not (
                shard.has_base
                and epoch(shard.generation) == now
                and self._upload(shard, sibling_generation(first.generation), line)
            ):
                self._await_upload(first, line)
                return False
        return True

    def _join_shard(self, shard: ShardClient, seconds: float, generation_seen: int = 0) -> pb.JoinResponse:
        request = pb.JoinRequest(
            identity=pb.WorkerIdentity(
                run_id=self._run_id,
                worker_id=self.identity.worker_id,
                incarnation=self.identity.incarnation,
            ),
            protocol_version=PROTOCOL_VERSION,
            method=self._method,
            method_settings=self._method_settings,
            layout=layout_to_message(self._replica.layout),
            shard_index=shard.index,
            num_shards=len(self.shards),
            generation_seen=generation_seen,
            has_replica=self._has_replica,
            loaded=self._loaded if shard.index == 0 else None,
            index_codecs=self._wanted_codecs(),
            value_codecs=READABLE_VALUE_CODECS,
        )
        patience, alive_until = self.patience(shard, seconds), math.inf
        self._has_asked = True  # there may be a lease, whether or not the answer comes
        while True:
            answer: pb.JoinResponse | Rejected = shard.connection.ask(
                patience,
                lambda timeout: shard.connection.stub.Join.future(request, timeout=timeout),
                lambda call: call.result(),
                partial(self._meaning, shard),
            )
            if not isinstance(answer, Rejected):
                break
            # A restarted worker meets its predecessor's lease: wait for its end, but not for a renewal.
            lease_seconds, now = float(answer.metadata.get("lease_seconds", 0)), time.monotonic()
            if answer.reason is ErrorCode.WORKER_ALIVE and math.isinf(alive_until):
                alive_until = now + lease_seconds + 1.0
                log.warning("%s; waiting up to %.0f s for the end of its lease", answer.detail, lease_seconds)
            if answer.reason is not ErrorCode.WORKER_ALIVE or now > min(alive_until, self._hurry_until):
                raise from_refusal(answer) from None
            self._pause(answer.retry_seconds or 0.5)
        self._require_codecs(shard, answer)
        shard.readable = frozenset(answer.index_codecs or PLAIN_INDEX_CODECS)
        return answer

    def _meaning(self, shard: ShardClient, error: grpc.RpcError) -> Exception:
        """Return what a failed Join means: at first an address in the wrong place, later a shard that has moved."""
        failure = from_rpc_error(error)
        misplaced = isinstance(failure, Transient) and failure.reason is ErrorCode.SHARD_MISMATCH
        if misplaced and not self._joined and not shard.connection.is_located:
            return RefusedError(Rejected(ErrorCode.SHARD_MISMATCH, str(failure)))
        return failure

    def _pause(self, seconds: float) -> None:
        """Wait before asking again.

        Raises:
            ServerUnreachableError: nobody waits any longer for what is asked.
        """
        pause(seconds)
        if is_cancelled():
            raise ServerUnreachableError(self.coordinator.address, 0.0, "joining was interrupted", STEP_AGAIN)

    def _require_codecs(self, shard: ShardClient, answer: pb.JoinResponse) -> None:
        for setting, codecs, readable in (
            ("value_type", VALUE_CODECS, answer.value_codecs or PLAIN_VALUE_CODECS),
            ("index_codec", INDEX_CODECS, answer.index_codecs or PLAIN_INDEX_CODECS),
        ):
            name = getattr(self.settings, setting)
            if name in codecs and codecs[name] not in readable:
                known = ", ".join(other for other, number in codecs.items() if number in readable)
                raise ConfigurationError(
                    f"{shard.address} does not read {setting} {name!r}; use one of {known}, or upgrade the server"
                )

    def _await_upload(self, first: pb.JoinResponse, line: WaitLine) -> None:
        """Wait until there is reason to join again: the model is there, or nobody uploads one."""
        answer: pb.JoinResponse | pb.RenewLeaseResponse = first
        seconds = first.retry_seconds
        self._pause(seconds)
        while answer.HasField("upload") and time.monotonic() < self._hurry_until:
            line.show(
                f"{shown(answer.upload.worker_id)} uploads the model", answer.upload.share, answer.upload.seconds_left
            )
            self._pause(seconds)
            seconds = min(_LONGEST_PAUSE_SECONDS, 1.5 * seconds)
            try:
                answer = self.coordinator.lease_connection.stub.RenewLease(
                    pb.RenewLeaseRequest(identity=self.identity), timeout=self.settings.deadline_seconds
                )
            except grpc.RpcError:
                return  # joining again shows what it is
            self._moved = time.monotonic()

    def _has_uploaded(self, shard: ShardClient, answer: pb.JoinResponse, generation: int) -> bool:
        """Tell whether a shard has its range of this upload already: nobody else is given this generation."""
        is_there = answer.state == pb.JOIN_STATE_READY and answer.generation == generation
        if is_there:
            shard.adopt(generation)
        return is_there

    def _upload(self, shard: ShardClient, generation: int, line: WaitLine) -> bool:
        """Send a shard its range; False if another worker was faster, so that the join must be tried again."""
        with_buffers = shard.index == 0 and self.run_settings.buffer_policy != pb.BUFFER_POLICY_NONE
        buffers = pack(self._buffers.now()) if with_buffers else b""
        header = pb.UploadHeader(
            identity=self.identity,
            generation=generation,
            version=shard.version if shard.has_base else 0,
            buffer_bytes=len(buffers),
            digest=self._digest() if shard.index == 0 else b"",
        )
        behind = sum(other.span.length for other in self.shards[shard.index + 1 :])  # which are sent before

        def moved(elements: int, nbytes: int) -> None:
            self._moved = time.monotonic()
            self.upload_bytes += nbytes
            self.leases.uploaded = (behind + elements) / self._replica.layout.size
            line.show("uploading the model", self.leases.uploaded)

        upload = ModelUpload(shard, header, self._replica, buffers, self.run_settings.chunk_bytes, moved)
        try:
            answer = upload.send(self.patience(shard))
        finally:
            self.leases.uploaded = None
            if upload.is_sent:
                shard.sent_model = generation, header.version
        if isinstance(answer, Rejected):
            if answer.reason in REJOIN_REASONS or answer.reason is ErrorCode.ALREADY_UPLOADED:
                return False
            raise from_refusal(answer) from None
        shard.adopt(generation, version=answer.version)
        shard.acknowledged_reply, shard.replica_is_image = 0, False
        return True

    def _digest(self) -> bytes:
        """Return what tells the model from others where a training begins with it; nothing where it goes on with it."""
        if self._loaded is not None:
            return self._loaded.digest
        return b"" if self.coordinator.has_base else self._replica.digest()

    def leave(self) -> None:
        """End the lease everywhere; failures are of no consequence, the lease ends anyway."""
        self.leases.stop()
        if self._has_asked:
            if self.run_finished and len(self.shards) > 1:
                finish = pb.FinishRunRequest(run_id=self.identity.run_id)
                self._tell_all(lambda stub: stub.FinishRun.future(finish, timeout=_LEAVING_SECONDS))
            leave = pb.LeaveRequest(identity=self.identity)
            self._tell_all(lambda stub: stub.Leave.future(leave, timeout=_LEAVING_SECONDS))
        # A thread that outlives the interpreter's end would free tensors when torch can no longer do so.
        self.leases.join()

    def _tell_all(self, call: Callable[[ParameterServerServiceStub], "grpc._CallFuture[Any]"]) -> None:
        """Make a call at all shards at once; one that does not answer costs the others nothing."""
        calls: list[grpc._CallFuture[Any]] = []
        for shard in self.shards:
            suppress_errors(lambda shard=shard: calls.append(call(shard.connection.stub)))  # type: ignore[misc]
        for told in calls:
            suppress_errors(told.result)
