"""All shards together: joining, the lease, pushing and pulling in parallel, and what to do when something is lost.

The rules are those of docs/protocol.md; this file is where a worker follows them.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
import torch

from psclient.connection import Patience
from psclient.errors import (
    LeaseLostError,
    ServerFaultError,
    ServerNotReadyError,
    SparsepsError,
    Transient,
    from_refusal,
    from_rpc_error,
)
from psclient.replica import Replica
from psclient.settings import ClientSettings
from psclient.shard import REJOIN_REASONS, PulledReply, PushPart, ShardClient
from pscore import frames
from pscore.buffers import is_exchanged, pack, packed_bytes, unpack
from pscore.generation import epoch, sibling_generation
from pscore.layout import ModelLayout, Span
from pscore.messages import PROTOCOL_VERSION, layout_to_message
from pscore.reasons import Reason, Refusal
from pscore.v1 import parameter_server_pb2 as pb

log = logging.getLogger("psclient")

Result = TypeVar("Result")

SLOWEST_BYTES_A_SECOND = 1e6
"""The slowest network that bulk transfers are given time for at the first attempt."""

_MOST_REJOINS = 20  # in one step; each may wait, so this is a guard against a loop, not a time limit


@dataclass
class PushOutcome:
    """What became of the parts of a push."""

    answers: dict[int, pb.PushSparseResponse] = field(default_factory=dict)
    """Acknowledged parts, by shard."""
    refused: list[PushPart] = field(default_factory=list)
    """Refused parts, whose payload must go back into the residual."""
    error: Refusal | None = None
    """A refusal that is the caller's fault and should be raised once the payload is back."""


class Cluster:
    """The servers of one run, for one worker.

    Args:
        shard_addresses: ``HOST:PORT`` of each shard in order.
        worker_id: this worker's name.
        replica: the model.
        buffers: the model's persistent buffers, in layout order.
        method: name of the training method.
        method_settings: settings in which workers must agree.
        settings: time limits and forms.
    """

    def __init__(
        self,
        shard_addresses: Sequence[str],
        worker_id: str,
        replica: Replica,
        buffers: Sequence[torch.Tensor],
        method: str,
        method_settings: Mapping[str, str],
        settings: ClientSettings,
    ) -> None:
        """Prepare; :meth:`join` makes the first contact."""
        self.settings = settings
        self.replica = replica
        self.layout: ModelLayout = replica.layout
        self.identity = pb.WorkerIdentity(run_id=settings.run_id, worker_id=worker_id, incarnation=str(uuid.uuid4()))
        self.shards = [ShardClient(address, i, settings) for i, address in enumerate(shard_addresses)]
        for shard, span in zip(self.shards, self.layout.shard_spans(len(self.shards)), strict=True):
            shard.span = span
        self.run_settings = pb.RunSettings()
        self.live_workers = 0
        self.run_finished = False
        self.last_push_record: tuple[str, int] | None = None
        """(incarnation, step) of the last push that the coordinator knows under this name, as of the first join."""
        self._buffers = tuple(buffers)
        self._method = method
        self._method_settings = dict(method_settings)
        self._joined = False
        self._outcome: PushOutcome | None = None
        self.exchanged_buffers = tuple(spec for spec in self.layout.buffers if is_exchanged(spec))
        """What :meth:`exchange_buffers` moves."""
        self._pool = (
            ThreadPoolExecutor(len(self.shards), thread_name_prefix="psclient") if len(self.shards) > 1 else None
        )
        self._stop = threading.Event()

    @property
    def coordinator(self) -> ShardClient:
        """Shard 0."""
        return self.shards[0]

    @property
    def _has_replica(self) -> bool:
        return all(shard.has_base for shard in self.shards)

    @property
    def in_doubt(self) -> bool:
        """True while the last push is not settled: a part is in doubt, or a refused one has not been handed back."""
        return self._outcome is not None or any(shard.in_doubt is not None for shard in self.shards)

    def held_parts(self) -> list[PushPart]:
        """Return the parts of an unsettled push that are in doubt, or refused and not handed back."""
        refused = self._outcome.refused if self._outcome is not None else []
        return refused + [shard.in_doubt for shard in self.shards if shard.in_doubt is not None]

    def hurry(self, seconds: float) -> None:
        """Wait no longer than this from now on; a worker that is told to stop has little time."""
        shorter = min(seconds, self.settings.patience_seconds)
        self.settings = self.settings.model_copy(
            update={"patience_seconds": shorter, "deadline_seconds": min(shorter, self.settings.deadline_seconds)}
        )
        for shard in self.shards:
            shard.settings = self.settings

    # Joining

    def join(self) -> None:
        """Join every shard, upload the model if this worker is to, and return once every shard has it.

        Raises:
            SparsepsError: unreachable, another model, another method, a living worker of the same name.
        """
        seconds = self.settings.patience_seconds if self._joined else self.settings.connect_seconds
        started = time.monotonic()
        if self._joined:
            for shard in self.shards:
                shard.connection.renew()
        while not self._try_join(seconds):
            if time.monotonic() - started > seconds:
                raise ServerNotReadyError(
                    f"{self.coordinator.address} has no model after {seconds:.0f} s, and a worker that should upload "
                    "one has not done so; check whether that worker lives, or restart all shards together"
                )
        if not self._joined:
            self._joined = True
            threading.Thread(target=self._keep_leases, name="psclient-lease", daemon=True).start()

    def _try_join(self, seconds: float) -> bool:
        answers = [self._join_shard(shard, seconds) for shard in reversed(self.shards[1:])]
        known = [shard.generation for shard in self.shards]
        seen = max(*known, *(answer.generation for answer in answers), 0)
        first = self._join_shard(self.coordinator, seconds, generation_seen=seen)
        if self.identity.run_id != first.run_id and self._joined:
            log.warning("the server now serves run %s; going on there", first.run_id)
        self.identity.run_id = first.run_id
        self.run_settings = first.settings
        self.live_workers = first.live_workers
        self.run_finished = first.run_state == pb.RUN_STATE_FINISHED
        if not self._joined:
            self.last_push_record = (first.last_incarnation, first.last_step) if first.last_step else None
        trained_elsewhere = any(answer.state == pb.JOIN_STATE_READY and answer.version for answer in answers)
        if first.state == pb.JOIN_STATE_UPLOAD and trained_elsewhere and not self._has_replica:
            time.sleep(
                first.retry_seconds
            )  # fresh weights must not replace trained ones: a worker with a replica may come
            return False
        if first.state == pb.JOIN_STATE_UPLOAD:
            done = all(self._upload(shard, first.generation) for shard in reversed(self.shards))
            if not done:
                time.sleep(first.retry_seconds)
            return done
        if first.state != pb.JOIN_STATE_READY:
            time.sleep(first.retry_seconds)
            return False
        now = epoch(first.generation)
        for shard, answer in zip(self.shards, (first, *reversed(answers)), strict=True):
            if answer.state == pb.JOIN_STATE_READY and epoch(answer.generation) == now:
                shard.adopt(answer.generation)
            elif not (
                shard.has_base
                and epoch(shard.generation) == now
                and self._upload(shard, sibling_generation(first.generation))
            ):
                time.sleep(first.retry_seconds)
                return False
        return True

    def _join_shard(self, shard: ShardClient, seconds: float, generation_seen: int = 0) -> pb.JoinResponse:
        request = pb.JoinRequest(
            identity=pb.WorkerIdentity(
                run_id=self.settings.run_id,
                worker_id=self.identity.worker_id,
                incarnation=self.identity.incarnation,
            ),
            protocol_version=PROTOCOL_VERSION,
            method=self._method,
            method_settings=self._method_settings,
            layout=layout_to_message(self.layout),
            shard_index=shard.index,
            num_shards=len(self.shards),
            generation_seen=generation_seen,
            has_replica=self._has_replica,
        )
        alive_until: float | None = None
        for attempt in self._patience(shard, seconds):
            with attempt:
                try:
                    return shard.connection.stub.Join(request, timeout=attempt.timeout, wait_for_ready=True)
                except grpc.RpcError as error:
                    failure = from_rpc_error(error)
                    if not isinstance(failure, Refusal):
                        raise failure from error
                    if failure.reason is not Reason.WORKER_ALIVE:
                        raise from_refusal(failure) from error
                    # A restarted worker meets its predecessor's lease: wait for its end, but not for a renewal.
                    now = time.monotonic()
                    alive_until = alive_until or now + float(failure.metadata.get("lease_seconds", 0)) + 1.0
                    if now > alive_until:
                        raise from_refusal(failure) from error
                    raise Transient(failure.detail, failure.retry_seconds or 0.5) from error
        raise AssertionError("patience does not end by itself")

    def _upload(self, shard: ShardClient, generation: int) -> bool:
        """Send a shard its range; False if another worker was faster, so that the join must be tried again."""
        version = shard.version if shard.has_base else 0
        with_buffers = shard.index == 0 and self.run_settings.buffer_policy != pb.BUFFER_POLICY_NONE
        buffers = pack(self._buffers) if with_buffers else b""

        def messages() -> Iterator[pb.UploadModelRequest]:
            yield pb.UploadModelRequest(
                header=pb.UploadHeader(
                    identity=self.identity, generation=generation, version=version, buffer_bytes=len(buffers)
                )
            )
            checksum = frames.Checksum()
            for segment in self.replica.read(shard.span):
                for chunk in frames.encode(segment, chunk_bytes=self.run_settings.chunk_bytes):
                    checksum.add(chunk)
                    yield pb.UploadModelRequest(chunk=chunk)
            for piece in frames.encode_bytes(buffers, self.run_settings.chunk_bytes):
                yield pb.UploadModelRequest(buffers=piece)
            yield pb.UploadModelRequest(commit=checksum.commit())

        nbytes = 4 * shard.span.length + len(buffers)
        for attempt in self._patience(shard, extra_seconds=nbytes / SLOWEST_BYTES_A_SECOND):
            with attempt:
                try:
                    response = shard.connection.stub.UploadModel(messages(), timeout=attempt.timeout)
                except grpc.RpcError as error:
                    failure = from_rpc_error(error)
                    if not isinstance(failure, Refusal):
                        raise failure from error
                    if failure.reason in REJOIN_REASONS or failure.reason is Reason.ALREADY_UPLOADED:
                        return False
                    raise from_refusal(failure) from error
                shard.adopt(generation, version=response.version)
                shard.acknowledged_reply, shard.replica_is_image = 0, False
                return True
        raise AssertionError("patience does not end by itself")

    # Pushing and pulling

    def open_push(self, step: int, samples: int, groups: Sequence[Span]) -> list[dict[int, int]]:
        """Begin a push at every shard; return, for each shard, which place each group has in its plan."""
        places = []
        for shard in self.shards:
            parts = {number: group.intersect(shard.span) for number, group in enumerate(groups)}
            parts = {number: part for number, part in parts.items() if part.length}
            shard.open_push(self.identity, step, samples, list(parts.values()))
            places.append({number: place for place, number in enumerate(parts)})
        return places

    def abandon_push(self) -> list[PushPart]:
        """Break off a push that has no commit yet, and return its parts."""
        return [part for shard in self.shards if (part := shard.abandon_push()) is not None]

    def settle(self) -> PushOutcome:
        """Wait until every part of the last push is acknowledged or refused (docs/protocol.md, *On the worker*).

        Raises:
            ServerUnreachableError: some part is still in doubt; call again to go on.
        """
        outcome = self._outcome = self._outcome or PushOutcome()  # kept where this is interrupted
        for _ in range(_MOST_REJOINS):
            waiting = [shard for shard in self.shards if shard.in_doubt is not None]
            if not waiting:
                self._outcome = None
                return outcome
            answers = self._each(waiting, lambda shard: shard.settle(self._patience(shard)))
            if self._sort_answers(waiting, answers, outcome):
                self.join()
                for shard in self.shards:
                    if shard.in_doubt is not None and shard.in_doubt.generation != shard.generation:
                        outcome.refused.append(shard.in_doubt)
                        shard.in_doubt = None
        raise LeaseLostError("the server takes the worker in and refuses its pushes again and again")

    def _sort_answers(
        self,
        waiting: Sequence[ShardClient],
        answers: Sequence[pb.PushSparseResponse | Refusal | None],
        outcome: PushOutcome,
    ) -> bool:
        """File each answer; tell whether the worker must join again."""
        rejoin = False
        for shard, answer in zip(waiting, answers, strict=True):
            if isinstance(answer, pb.PushSparseResponse):
                outcome.answers[shard.index] = answer
                self.live_workers = max(1, answer.live_workers)
                self.run_finished |= answer.run_state == pb.RUN_STATE_FINISHED
                continue
            if not isinstance(answer, Refusal) or shard.in_doubt is None:
                continue
            rejoin |= answer.reason in REJOIN_REASONS
            if answer.reason is Reason.LEASE_EXPIRED:
                continue  # the same part is repeated after joining
            outcome.refused.append(shard.in_doubt)
            shard.in_doubt = None
            if answer.reason is Reason.VERSION_IN_FUTURE:
                shard.has_base = False
            if answer.reason is Reason.RUN_FINISHED:
                self.run_finished = True
            elif answer.reason not in REJOIN_REASONS:
                outcome.error = answer
        return rejoin

    def pull(self) -> dict[int, PulledReply]:
        """Bring the replica up to date at every shard; return the replies by shard.

        Raises:
            ServerUnreachableError: some shard did not answer; the replica is whole, and older there.
        """
        done: dict[int, PulledReply] = {}
        for _ in range(_MOST_REJOINS):
            waiting = [shard for shard in self.shards if shard.index not in done]
            if not waiting:
                return done
            answers = self._each(waiting, lambda shard: shard.pull(self.identity, self._pull_patience(shard)))
            rejoin = False
            for shard, answer in zip(waiting, answers, strict=True):
                if isinstance(answer, PulledReply):
                    self._apply(shard, answer)
                    done[shard.index] = answer
                elif answer.reason in REJOIN_REASONS:
                    rejoin = True
                    if answer.reason is Reason.VERSION_IN_FUTURE:
                        shard.has_base = False
                else:
                    raise from_refusal(answer)
            if rejoin:
                self.join()
        raise LeaseLostError("the server takes the worker in and refuses its pulls again and again")

    def _apply(self, shard: ShardClient, reply: PulledReply) -> None:
        started = time.perf_counter()
        if reply.header.mode == pb.REPLY_MODE_TOPK:
            if not shard.replica_is_image:
                raise ServerFaultError(f"{shard.address} sent differences to a replica of which it has no image")
            self.replica.add(reply.segments)
        else:
            self.replica.write(reply.segments)
            if reply.header.image:
                self.replica.open_fp32(shard.span)
        self.run_finished |= reply.header.run_state == pb.RUN_STATE_FINISHED
        shard.applied(reply)
        reply.apply_seconds += time.perf_counter() - started

    # Buffers and the end

    def exchange_buffers(self, step: int, samples: int, *, adopt: bool = False) -> int:
        """Contribute this worker's buffers to the average; return the bytes moved.

        Args:
            step: the worker's step.
            samples: samples that the buffers have seen since the last exchange; 0 contributes nothing.
            adopt: take the average over even where the policy leaves each worker its own (after joining).
        """
        specs = self.exchanged_buffers
        mine = [tensor for spec, tensor in zip(self.layout.buffers, self._buffers, strict=True) if is_exchanged(spec)]
        data = pack(mine)
        header = pb.BuffersHeader(
            identity=self.identity,
            step=step,
            generation=self.coordinator.generation,
            samples=samples,
            buffer_bytes=len(data),
        )
        messages = [pb.ExchangeBuffersRequest(header=header)]
        messages += [
            pb.ExchangeBuffersRequest(buffers=piece)
            for piece in frames.encode_bytes(data, self.run_settings.chunk_bytes)
        ]
        moved = sum(frames.wire_bytes(message) for message in messages)
        for attempt in self._patience(self.coordinator):
            with attempt:
                reader = frames.BytesReader(packed_bytes(specs), packed_bytes(specs))
                try:
                    responses = self.coordinator.connection.stub.ExchangeBuffers(
                        iter(messages), timeout=attempt.timeout, wait_for_ready=True
                    )
                    for response in responses:
                        moved += frames.wire_bytes(response)
                        reader.read(response.buffers)
                    average = reader.finish()
                except grpc.RpcError as error:
                    failure = from_rpc_error(error)
                    if isinstance(failure, Refusal) and failure.reason in REJOIN_REASONS:
                        return moved  # the next pull joins again; the next period exchanges
                    raise (from_refusal(failure) if isinstance(failure, Refusal) else failure) from error
                except Refusal as damage:
                    raise ServerFaultError(
                        f"{self.coordinator.address} sent damaged buffers: {damage.detail}"
                    ) from damage
                if adopt or self.run_settings.buffer_policy == pb.BUFFER_POLICY_SYNC:
                    for tensor, value in zip(mine, unpack(average, specs), strict=True):
                        tensor.copy_(value)
                return moved
        raise AssertionError("patience does not end by itself")

    def finish_run(self) -> None:
        """Tell every shard that the run is over (idempotent)."""
        for shard in self.shards:
            self.quietly(
                lambda shard=shard: shard.connection.stub.FinishRun(  # type: ignore[misc]
                    pb.FinishRunRequest(run_id=self.identity.run_id), timeout=self.settings.deadline_seconds
                ),
            )
        self.run_finished = True

    def leave(self) -> None:
        """End the lease everywhere and close the channels; failures are of no consequence, the lease ends anyway."""
        self._stop.set()
        if self._joined:
            if self.run_finished and len(self.shards) > 1:
                self.finish_run()
            for shard in self.shards:
                self.quietly(
                    lambda shard=shard: shard.connection.stub.Leave(  # type: ignore[misc]
                        pb.LeaveRequest(identity=self.identity), timeout=2.0
                    )
                )
        for shard in self.shards:
            shard.connection.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    # Inner parts

    def _patience(self, shard: ShardClient, seconds: float | None = None, extra_seconds: float = 0.0) -> Patience:
        if seconds is None:
            seconds = self.settings.patience_seconds
        deadline = self.settings.deadline_seconds if self._joined else min(5.0, self.settings.deadline_seconds)
        return Patience(shard.address, seconds + extra_seconds, deadline + extra_seconds)

    def _pull_patience(self, shard: ShardClient) -> Patience:
        everything = 0.0 if shard.has_base else 4 * shard.span.length / SLOWEST_BYTES_A_SECOND
        return self._patience(shard, extra_seconds=everything)

    def _each(self, shards: Sequence[ShardClient], call: Callable[[ShardClient], Result]) -> list[Result]:
        """Call for every shard in parallel and return the results in order; the first error is raised after all."""
        if self._pool is None or len(shards) == 1:
            return [call(shard) for shard in shards]
        futures = [self._pool.submit(call, shard) for shard in shards]
        for future in futures:
            future.exception()
        return [future.result() for future in futures]

    def _keep_leases(self) -> None:
        while not self._stop.wait(max(0.1, self.run_settings.lease_seconds / 3)):
            for shard in self.shards:
                self.quietly(
                    lambda shard=shard: shard.connection.stub.RenewLease(  # type: ignore[misc]
                        pb.RenewLeaseRequest(identity=self.identity),
                        timeout=max(0.5, self.run_settings.lease_seconds / 3),
                    )
                )

    @staticmethod
    def quietly(call: Callable[[], object]) -> None:
        """Make a call whose failure is of no consequence."""
        try:
            call()
        except (grpc.RpcError, SparsepsError, ValueError) as error:  # ValueError: the channel was closed meanwhile
            log.debug("ignored: %s", error)
