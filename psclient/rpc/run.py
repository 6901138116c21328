"""A worker's place in a run: joining, uploading, leasing samples, leaving (docs/reference/protocol.md, *Joining*)."""

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc

from psclient.errors import (
    REJOIN_REASONS,
    START_FIRST,
    STEP_AGAIN,
    ConfigurationError,
    LeaseLostError,
    RefusedError,
    ServerNotReadyError,
    ServerUnreachableError,
    Transient,
    WorkersStillTrainingError,
    from_refusal,
    from_rpc_error,
)
from psclient.executor import SerialExecutor, is_cancelled
from psclient.model.module import NamedBuffers
from psclient.rpc.channel import HANDSHAKE_SECONDS, RetryPolicy, suppress_errors
from psclient.rpc.lease_thread import LeaseThread, start_all
from psclient.rpc.progress_line import ProgressLine
from psclient.rpc.samples import SampleTracker
from psclient.rpc.shard_stream import WAIT_SHARE, ShardStream, Uploaded
from psclient.settings import ClientSettings
from pscore.model.buffers import pack
from pscore.names import shown
from pscore.version import __version__
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
from pscore.wire.histories import losses
from pscore.wire.layouts import pack_layout
from pscore.wire.protocol import NEWEST_PROTOCOL, OLDEST_PROTOCOL
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub

log = logging.getLogger("psclient")

Result = TypeVar("Result")

_LEAVING_SECONDS = 2.0
_CLOSING_SECONDS = 1.0
_MOST_REJOINS = 20  # in one step; each may wait, so this is a guard against a loop, not a time limit
_FIRST_DEADLINE_SECONDS = 5.0  # before the first contact: a wrong address should be said soon
_LONGEST_WAIT_SECONDS = 3600.0  # of one call, for other workers
_WAIT_SECONDS = 1.0  # of one call, while the worker joins: then progress is shown, and deadlines are looked at


class Run:
    """One worker's place in a run, at all of its shards.

    ``make_way`` ends this process's earlier worker of the same name, which the run knows to be alive, and tells whether
    there was one.

    Attributes:
        joins: how often the worker has joined; after another join, its samples may be leased to others.
        first_step: the lowest number that the next step should have, as of the last join.
        joined_version: of shard 0, as of the last join.
        last_push_record: incarnation and step of the last push under this name that shard 0 knew at the first join.
        upload_bytes: message bytes of models sent.
        digest: of the model with which this worker began the training by an upload; else empty.
        progress: of the samples that this worker leases, if it does.
    """

    def __init__(
        self,
        shards: Sequence[ShardStream],
        worker_id: str,
        replica: Uploaded,
        buffers: NamedBuffers,
        method: str,
        method_settings: Mapping[str, str],
        settings: ClientSettings,
        make_way: Callable[[], bool],
    ) -> None:
        try:
            layout = pack_layout(replica.layout)
        except Rejected as refusal:
            raise ConfigurationError(refusal.detail) from refusal
        self.settings, self._make_way = settings, make_way
        self.shards, self.coordinator = tuple(shards), shards[0]
        self.replica, self.buffers = replica, buffers
        self.identity = pb.WorkerIdentity(run_id=settings.run_id, worker_id=worker_id, incarnation=str(uuid.uuid4()))
        self.leases = LeaseThread(self.shards, self.identity)
        self.joins = self.live_workers = self.first_step = self.joined_version = self.upload_bytes = 0
        self.run_settings, self.run_finished = pb.RunSettings(), False
        self.last_push_record: tuple[str, int] | None = None
        self.digest = b""
        self.progress: SampleTracker | None = None
        # One thread a shard, if there are several; daemons, so that they still work when the interpreter ends.
        self._threads = [SerialExecutor(f"psclient-{i}") for i in range(len(shards))] if len(shards) > 1 else []
        self._cancelling = SerialExecutor("psclient-cut")
        codec = INDEX_CODECS.get(settings.index_codec)  # none: "auto"
        self._request = pb.JoinRequest(
            identity=self.identity,
            protocol_version=OLDEST_PROTOCOL,
            newest_protocol_version=NEWEST_PROTOCOL,
            release=__version__,
            method=method,
            method_settings=dict(method_settings),
            layout=layout,
            num_shards=len(self.shards),
            index_codecs=READABLE_INDEX_CODECS if codec is None else (pb.INDEX_CODEC_DENSE, codec),  # type: ignore[arg-type]
            value_codecs=READABLE_VALUE_CODECS,
        )
        self._joining = threading.Lock()
        self._has_asked = False  # there may be a lease, whether or not the answer came
        self._loaded: pb.LoadedModel | None = None  # which this join offers in the place of the server's model
        self._load_refused = False
        self._lost_parts = ""  # of which shards the model is gone, and what helps
        self._last_progress = 0.0  # of an upload, by any worker, while this one joins; monotonic seconds
        self._deadline = math.inf
        self._waits, self._waiting_since = 0, -1  # how many waits for all there were; the last step before one in vain
        self._waiting: Any = None  # the call that waits

    @property
    def _has_replica(self) -> bool:
        return all(shard.has_base for shard in self.shards)

    def set_deadline(self, seconds: float) -> None:
        """Wait for servers no longer than this from now on."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    @property
    def seconds_left(self) -> float | None:
        """How much longer a server may be waited for; ``None`` without :meth:`set_deadline`."""
        return None if math.isinf(self._deadline) else max(0.0, self._deadline - time.monotonic())

    def policy(self, seconds: float | None = None) -> RetryPolicy:
        """Return how long one undertaking may take; ``seconds`` instead of the settings' patience."""
        deadline_seconds = self.settings.deadline_seconds
        return RetryPolicy(
            self.settings.patience_seconds if seconds is None else seconds,
            deadline_seconds if self.leases.is_started else min(_FIRST_DEADLINE_SECONDS, deadline_seconds),
            STEP_AGAIN if self.joins else START_FIRST,
            limit=lambda: self._deadline,
            handshake_seconds=math.inf if self.joins else HANDSHAKE_SECONDS,  # later, a server is being set up anew
        )

    def join(self, loaded: pb.LoadedModel | None = None) -> bool:
        """Join every shard, upload the model if this worker is to, and return once every shard has it.

        ``loaded`` offers the worker's model in the place of the server's; the result tells whether the server took it.

        Raises:
            SparsepsError: unreachable, another model, another method, a living worker of the same name.
        """
        with self._joining:  # a push, a fetch and a sampler may find out in three threads that they must
            seconds = self.settings.patience_seconds if self.joins else self.settings.connect_seconds
            self._loaded, self._last_progress, self._lost_parts = loaded, time.monotonic(), ""
            seconds = min(seconds, self._deadline - self._last_progress)
            if self.joins and loaded is None:
                for shard in self.shards:
                    shard.connection.reconnect(at_once=True)
            with ProgressLine() as line:
                while not self._try_join(seconds, line):
                    self._require_not_cancelled()
                    if time.monotonic() > min(self._last_progress + seconds, self._deadline):
                        raise ServerNotReadyError(
                            self._lost_parts
                            or f"no model on {self.coordinator.address} after {seconds:.0f} s, and the uploading "
                            "worker made no progress; check that worker, or restart all shards together"
                        )
            self.joins += 1
            if self.joins == 1:
                self._log_joined()
            return not self._load_refused

    def _log_joined(self) -> None:
        log.info(
            "worker %s has joined run %s at %s, version %d: %s",
            self.identity.worker_id,
            shown(self.identity.run_id),
            ",".join(shard.address for shard in self.shards),
            self.joined_version,
            "its model was uploaded" if self.coordinator.has_base else "the server's parameters are taken over",
        )
        is_feed = self.replica.layout.word_bytes > 0
        trained_before = (
            not is_feed and self.joined_version > 0 and self.live_workers <= 1 and not self.coordinator.has_base
        )
        if trained_before and not self.run_finished:
            log.warning(
                "this worker goes on with run %s, which others have trained to version %d and left: its parameters are "
                "the server's now. For a new run start a server with another --data-dir, or without one",
                shown(self.identity.run_id),
                self.joined_version,
            )
        if self.run_finished:
            log.warning(
                "run %s is finished, at version %d: nothing more is trained here; for another run start a server with "
                "another --data-dir, or without one",
                shown(self.identity.run_id),
                self.joined_version,
            )

    def _try_join(self, seconds: float, line: ProgressLine) -> bool:
        """Join every shard, shard 0 last; False if that must be tried again."""
        answers = [self._join_shard(shard, seconds) for shard in reversed(self.shards[1:])]
        seen = max(*(shard.generation for shard in self.shards), *(answer.generation for answer in answers), 0)
        first = self._join_shard(self.coordinator, seconds, generation_seen=seen)
        answers.append(first)
        self._note(first)
        self._note_lost_parts(answers[::-1])
        if first.state == pb.JOIN_STATE_UPLOAD:
            self._require_finite()
            trained = any(answer.state == pb.JOIN_STATE_READY and answer.version for answer in answers)
            # Fresh weights must not replace trained ones: a worker that has a replica may come.
            done = (self._has_replica or not trained) and all(
                self._upload(shard, answer, first.generation, line)
                for shard, answer in zip(reversed(self.shards), answers, strict=True)
            )
            if not done:
                self._await_upload(line)
            return done
        if first.state != pb.JOIN_STATE_READY:
            self._await_upload(line)
            return False
        now = epoch(first.generation)
        for shard, answer in zip(self.shards, reversed(answers), strict=True):
            if answer.state == pb.JOIN_STATE_READY and epoch(answer.generation) == now:
                shard.adopt(answer.generation)
            elif not (
                shard.has_base
                and epoch(shard.generation) == now
                and self._upload(shard, answer, sibling_generation(first.generation), line)
            ):
                if first.HasField("upload"):
                    self._await_upload(line)
                else:
                    is_ahead = epoch(answer.generation) > now
                    seen = max(first.generation, answer.generation)
                    self._join_shard(self.coordinator if is_ahead else shard, seconds, seen, waits=True)
                return False
        self._compare_shards(answers[::-1])
        return True

    def _require_finite(self) -> None:
        """Raise :class:`ConfigurationError` if a parameter of the model that is to be uploaded is not finite."""
        name = self.replica.not_finite()
        if name is not None:
            raise ConfigurationError(
                f"{name!r} has values that are not finite, and a run cannot begin with them; initialise it, or load a "
                "checkpoint, before the optimizer is made"
            )

    def _compare_shards(self, answers: Sequence[pb.JoinResponse]) -> None:
        """Warn of shards that have lost versions which other shards have seen."""
        known_shards = [known for answer in answers for known in answer.known_shards]
        for shard in self.shards:
            shard.seen = [known for known in known_shards if known.shard_index == shard.index]
        told = [
            (
                pb.ShardHistory(
                    shard_index=index, generation=answer.generation, version=answer.version, origins=answer.origins
                ),
                answer.known_shards,
            )
            for index, answer in enumerate(answers)
        ]
        for index, lost in losses(told).items():
            log.warning(
                "shard %d at %s has lost %d versions that others have seen: the shards' parameters are of different "
                "moments, as after restoring backups of different times. Go back to a checkpoint that all shards have: "
                "`psservice checkpoint list %s` lists them, `psservice restore --checkpoint` goes back",
                index,
                self.shards[index].address,
                lost,
                " ".join(shard.address for shard in self.shards),
            )

    def _note_lost_parts(self, answers: Sequence[pb.JoinResponse]) -> None:
        """Warn, once a join, of shards that have lost the model while others have it, unless one is on its way."""
        ready = [answer for answer in answers if answer.state == pb.JOIN_STATE_READY]
        version = max((answer.version for answer in ready), default=0)
        lost = [
            f"shard {shard.index} at {shard.address}"
            for shard, answer in zip(self.shards, answers, strict=True)
            if answer.state != pb.JOIN_STATE_READY and not answer.HasField("upload")
        ]
        had_warned, self._lost_parts = bool(self._lost_parts), ""
        if not version or not lost or self._has_replica:
            return
        self._lost_parts = (
            f"{' and '.join(lost)} {'has' if len(lost) == 1 else 'have'} no model, and other shards have version "
            f"{version}: data were lost. A worker that trained with that model uploads the missing part when it joins. "
            "If none lives, stop the servers, put the shard's folder back from a backup (docs/operate/durability.md, "
            "Backups), and start them again; or begin anew with all folders empty, perhaps with --init and an older "
            "model file"
        )
        if not had_warned:
            log.warning("%s", self._lost_parts)

    def _note(self, first: pb.JoinResponse) -> None:
        if self.identity.run_id != first.run_id and self.joins:
            log.warning(
                "the server now serves run %s: it was started again without the data of the run before. This worker "
                "goes on there, with the model that a worker uploads; what others had pushed may be lost "
                "(docs/operate/durability.md)",
                shown(first.run_id),
            )
        self.identity.run_id = first.run_id
        self.run_settings = first.settings
        self.leases.renewal_seconds = max(0.1, first.settings.lease_seconds / 3)
        self.leases.start()
        self.live_workers = first.live_workers
        self.run_finished = first.run_state == pb.RUN_STATE_FINISHED
        self.first_step, self.joined_version = first.first_step, first.version
        self._load_refused = first.load_refused
        if not self.joins:
            self.last_push_record = (first.last_incarnation, first.last_step) if first.last_step else None

    def _join_shard(
        self, shard: ShardStream, seconds: float, generation_seen: int = 0, *, waits: bool = False
    ) -> pb.JoinResponse:
        """Join one shard; ``waits``: the answer may wait for a model, of the epoch of ``generation_seen`` at least."""
        request = pb.JoinRequest(
            shard_index=shard.index,
            generation_seen=generation_seen,
            has_replica=self._has_replica,
            loaded=self._loaded if shard.index == 0 else None,
        )
        request.MergeFrom(self._request)
        is_first_contact = not self.joins and shard.connection.locate is None

        def attempt(timeout: float) -> pb.JoinResponse:
            wait = _WAIT_SECONDS if waits else max(0.0, min(_WAIT_SECONDS, alive_until - time.monotonic()))
            request.wait_seconds = min(wait, WAIT_SHARE * timeout)
            try:
                answer: pb.JoinResponse = shard.connection.result(
                    shard.connection.stub.Join.future(request, timeout=timeout)
                )
                return answer
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                if is_first_contact and isinstance(failure, Transient) and failure.reason is ErrorCode.SHARD_MISMATCH:
                    # At first an address in the wrong place; later a shard that has moved.
                    raise RefusedError(Rejected(ErrorCode.SHARD_MISMATCH, str(failure))) from error
                raise

        policy, alive_until = self.policy(seconds), 0.0
        self._has_asked = True
        while isinstance(answer := shard.connection.call(policy, attempt), Rejected):
            if answer.reason is ErrorCode.WORKER_ALIVE and self._make_way():
                continue
            # A restarted worker meets its predecessor's lease: wait for its end, but not for a renewal.
            lease_seconds, now = float(answer.metadata.get("lease_seconds", 0)), time.monotonic()
            if answer.reason is ErrorCode.WORKER_ALIVE and not alive_until:
                alive_until = now + lease_seconds + 1.0
                log.warning("%s; waiting up to %.0f s for the end of its lease", answer.detail, lease_seconds)
            if answer.reason is not ErrorCode.WORKER_ALIVE or now > min(alive_until, self._deadline):
                raise from_refusal(answer) from None
            self._require_not_cancelled()
        self._require_protocol(shard, answer)
        self._require_codecs(shard, answer)
        shard.readable = frozenset(answer.index_codecs or PLAIN_INDEX_CODECS)
        shard.origins, shard.joined_version = tuple(answer.origins), answer.version
        return answer

    def _require_not_cancelled(self) -> None:
        """Raise :class:`ServerUnreachableError` if the calling job is cancelled."""
        if is_cancelled():
            raise ServerUnreachableError(self.coordinator.address, 0.0, "joining was interrupted", STEP_AGAIN)

    def _require_protocol(self, shard: ShardStream, answer: pb.JoinResponse) -> None:
        protocol = answer.protocol_version or OLDEST_PROTOCOL
        if not OLDEST_PROTOCOL <= protocol <= NEWEST_PROTOCOL:
            said = f"{shard.address} answers in protocol {protocol}, which this worker does not speak"
            raise RefusedError(Rejected(ErrorCode.UNKNOWN_PROTOCOL, said))

    def _require_codecs(self, shard: ShardStream, answer: pb.JoinResponse) -> None:
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

    def _await_upload(self, line: ProgressLine) -> None:
        """Wait until there is reason to join again: shard 0 has the model, or no other worker uploads one to it."""
        while time.monotonic() < self._deadline and not is_cancelled():
            deadline_seconds = min(self.settings.deadline_seconds, max(0.1, self._deadline - time.monotonic()))
            request = pb.RenewLeaseRequest(identity=self.identity)
            request.wait_seconds = min(_WAIT_SECONDS, WAIT_SHARE * deadline_seconds)
            try:
                answer = self.coordinator.lease_connection.stub.RenewLease(request, timeout=deadline_seconds)
            except grpc.RpcError:
                return  # the next join meets the cause
            upload = answer.upload
            if not answer.HasField("upload") or upload.worker_id == self.identity.worker_id:
                return
            line.show(f"{shown(upload.worker_id)} uploads the model", upload.share, upload.seconds_left)
            self._last_progress = time.monotonic()

    def _upload(self, shard: ShardStream, joined: pb.JoinResponse, generation: int, line: ProgressLine) -> bool:
        """Send a shard its range, if it has none of this upload; False if another worker was faster: join again."""
        if joined.state == pb.JOIN_STATE_READY and joined.generation == generation:
            shard.adopt(generation)  # nobody else is given this generation
            return True
        with_buffers = shard.index == 0 and self.run_settings.buffer_policy != pb.BUFFER_POLICY_NONE
        buffers = pack(self.buffers.now()) if with_buffers else b""
        header = pb.UploadHeader(
            identity=self.identity,
            generation=generation,
            version=shard.version if shard.has_base else 0,
            buffer_bytes=len(buffers),
            digest=self._digest() if shard.index == 0 else b"",
        )
        behind = sum(other.span.length for other in self.shards[shard.index + 1 :])  # which are sent before

        def note_progress(elements: int, nbytes: int) -> None:
            self._last_progress = time.monotonic()
            self.upload_bytes += nbytes
            self.leases.uploaded = (behind + elements) / self.replica.layout.size
            line.show("uploading the model", self.leases.uploaded)

        try:
            answer = shard.upload(
                header, self.replica, buffers, self.run_settings.chunk_bytes, note_progress, self.policy()
            )
        finally:
            self.leases.uploaded = 0.0
        if isinstance(answer, Rejected):
            if answer.reason in REJOIN_REASONS or answer.reason is ErrorCode.ALREADY_UPLOADED:
                return False
            raise from_refusal(answer) from None
        shard.adopt(generation, version=answer.version)
        return True

    def _digest(self) -> bytes:
        """Return the digest of a model with which a training begins; nothing if a training goes on."""
        if self._loaded is not None:
            return self._loaded.digest
        self.digest = b"" if self.coordinator.has_base else self.replica.digest()
        return self.digest

    def each(self, shards: Sequence[ShardStream], call: Callable[[ShardStream], Result]) -> list[Result]:
        """Call for every shard in parallel and return the results in order; the first error is raised after all."""
        if len(shards) <= 1:
            return [call(shard) for shard in shards]
        parts = [self._threads[shard.index].submit(partial(call, shard), as_part=True) for shard in shards]
        for part in parts:
            part.wait()
        return [part.result() for part in parts]

    def joining_again(self, calls: str) -> Iterator[int]:
        """Yield how often the worker has joined again, and join before each further attempt."""
        for joins in range(_MOST_REJOINS):
            yield joins
            self.join()
        raise LeaseLostError(f"the server takes the worker in and refuses its {calls} again and again")

    def lease_samples(
        self, request: pb.LeaseSamplesRequest, *, waits: bool = False
    ) -> tuple[pb.LeaseSamplesResponse, int]:
        """Lease samples of shard 0; return its answer, and how often this worker had joined when it asked.

        After another join its samples may be others'. ``waits``: the answer may wait until there are some.
        """
        connection = self.coordinator.connection

        def attempt(seconds: float) -> pb.LeaseSamplesResponse:
            request.wait_seconds = WAIT_SHARE * seconds if waits else 0.0
            found: pb.LeaseSamplesResponse = connection.result(
                connection.stub.LeaseSamples.future(request, timeout=seconds)
            )
            return found

        for _ in self.joining_again("samples"):
            joins = self.joins
            request.identity.CopyFrom(self.identity)
            answer = connection.call(self.policy(), attempt)
            if isinstance(answer, pb.LeaseSamplesResponse):
                self.run_finished |= answer.run_state == pb.RUN_STATE_FINISHED
                return answer, joins
            if answer.reason not in REJOIN_REASONS:
                raise from_refusal(answer)
        raise AssertionError("joining again ends with an error")

    def cancel_unawaited(self) -> None:
        """End the calls of cancelled jobs; waits for nothing, so that any thread may call."""
        for shard in self.shards:
            self._cancelling.submit(shard.connection.cancel_unawaited)

    def close(self) -> None:
        """Leave the run and close the channels."""
        self.leave()
        for shard in self.shards:
            shard.close()
        for thread in (*self._threads, self._cancelling):
            thread.close(_CLOSING_SECONDS)

    def wait_for_all(self, seconds: float, step: int) -> None:
        """Say everywhere that this worker is through, and return when all live workers are, or the run is over.

        ``step`` is that of the last push: a wait in vain goes on if no push has followed it.

        Raises:
            WorkersStillTrainingError: after ``seconds``, or if :meth:`set_deadline` ends the wait.
            SparsepsError: a server is lost for longer than the patience.
        """
        self._waits += step != self._waiting_since
        self._waiting_since = step
        begun = time.monotonic()
        while not self.run_finished:
            left = begun + seconds - time.monotonic()
            waited_for = self._wait_once(left)
            if waited_for is None:
                self.join()  # the wait goes on, under the same number
            elif not waited_for:
                break
            elif left <= 0 or not math.isinf(self._deadline):
                raise WorkersStillTrainingError(waited_for, time.monotonic() - begun)
        self._waiting_since = -1

    def cancel_wait(self) -> None:
        """Have the call that waits for other workers answered soon, if there is one; waits for nothing."""
        self._cancelling.submit(self._end_wait)

    def _end_wait(self) -> None:
        if (call := self._waiting) is not None:
            call.cancel()

    def _wait_once(self, seconds: float) -> list[str] | None:
        """Return whom shard 0 has to wait for, at the latest after ``seconds``; ``None`` if the worker must join again.

        The other shards are told first: at the one that answers, nothing of this worker is missing then.
        """
        answered = pb.WaitForAllResponse()
        for shard in reversed(self.shards):
            held = max(0.0, seconds) if shard is self.coordinator else 0.0

            def attempt(timeout: float, shard: ShardStream = shard, held: float = held) -> pb.WaitForAllResponse:
                request = pb.WaitForAllRequest(identity=self.identity, number=self._waits)
                longest = min(held, WAIT_SHARE * timeout, _LONGEST_WAIT_SECONDS)
                request.wait_seconds = longest if math.isinf(self._deadline) else 0.0
                call = shard.connection.stub.WaitForAll.future(request, timeout=timeout)
                self._waiting = call
                if request.wait_seconds and not math.isinf(self._deadline):  # set_deadline() came in between
                    call.cancel()
                try:
                    answer: pb.WaitForAllResponse = shard.connection.result(call)
                    return answer
                finally:
                    self._waiting = None

            answer = shard.connection.call(self.policy(), attempt)
            if isinstance(answer, Rejected):
                if answer.reason in REJOIN_REASONS:
                    return None
                raise from_refusal(answer) from None
            answered = answer
        self.run_finished |= answered.run_state == pb.RUN_STATE_FINISHED
        return list(answered.workers)

    def leave(self) -> None:
        """End the lease everywhere; failures are of no consequence, the lease ends anyway."""
        self.leases.stop()
        if self._has_asked:
            leave = pb.LeaveRequest(identity=self.identity)
            self._call_all(lambda stub: stub.Leave.future(leave, timeout=_LEAVING_SECONDS))
        # A thread that outlives the interpreter's end would free tensors when torch can no longer do so.
        self.leases.join()

    def _call_all(self, start: Callable[[ParameterServerServiceStub], Any]) -> None:
        for _, call in start_all(self.shards, lambda shard: start(shard.connection.stub)):
            suppress_errors(call.result)
