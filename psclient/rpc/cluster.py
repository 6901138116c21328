"""All shards together: pushes, pulls and joins in parallel (docs/reference/protocol.md, *On the worker*)."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from psclient.compress.groups import Rates
from psclient.errors import REJOIN_REASONS, LeaseLostError, ServerFaultError, from_refusal
from psclient.executor import SerialExecutor
from psclient.model.memory import unrepeated
from psclient.rpc.membership import Membership
from psclient.rpc.push_part import PushPart
from psclient.rpc.samples import SampleTracker
from psclient.rpc.shard_client import PulledReply, ShardClient
from pscore.model.buffers import is_exchanged, pack, packed_bytes, unpack
from pscore.model.layout import Span
from pscore.wire import frames
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb

log = logging.getLogger("psclient")

Result = TypeVar("Result")

_CLOSING_SECONDS = 1.0
_MOST_REJOINS = 20  # in one step; each may wait, so this is a guard against a loop, not a time limit


@dataclass
class PushOutcome:
    """What became of the parts of a push; ``error`` is a refusal to be raised once ``refused`` parts are restored."""

    answers: list[pb.PushSparseResponse] = field(default_factory=list)
    refused: list[PushPart] = field(default_factory=list)
    error: Rejected | None = None


class Cluster:
    """The shards of one run, for one worker.

    Attributes:
        progress: of the samples that this worker leases.
        buffers: the floating-point ones and integer scalars, which are averaged.
    """

    def __init__(self, membership: Membership) -> None:
        self.membership, self.shards, self.replica = membership, membership.shards, membership.replica
        self.buffers = membership.buffers.only(is_exchanged)
        self.progress = SampleTracker()
        self._outcome: PushOutcome | None = None
        self._said_nan: set[str] = set()  # names of buffers
        self._pushed_samples = [0] * len(self.shards)  # of the last push, as its header says
        self._owed_samples = [0] * len(self.shards)
        """Samples of pushes that a shard did not apply: their gradients are in the residuals, and go with the next."""
        # One thread a shard, where there are several; daemons, so that they still work when the interpreter ends.
        self._threads = (
            [SerialExecutor(f"psclient-{shard.index}") for shard in self.shards] if len(self.shards) > 1 else []
        )
        self._cancelling = SerialExecutor("psclient-cut")

    def held_parts(self) -> list[PushPart]:
        """Return the parts of the last push that have no answer, or were refused and are not restored."""
        refused = self._outcome.refused if self._outcome is not None else []
        return refused + [shard.unacked for shard in self.shards if shard.unacked is not None]

    # Pushing

    def open_push(self, step: int, samples: int, rates: Rates, groups: Sequence[Span]) -> list[dict[int, int]]:
        """Begin a push at every shard; return, for each shard, which place each group has in its plan.

        A push without ``samples``, a flush, is told from others by that; it leaves what earlier pushes owe to the next.
        """
        places = []
        finished = self.progress.open_push(samples)
        for shard in self.shards:
            parts = {number: group.intersect(shard.span) for number, group in enumerate(groups)}
            parts = {number: part for number, part in parts.items() if part.length}
            header = pb.PushHeader(
                identity=self.membership.identity,
                step=step,
                samples=samples + self._owed_samples[shard.index] if samples else 0,
                learning_rate=rates.carried,
                group_rates=rates.of_groups,
                finished=finished if shard is self.membership.coordinator else [],
            )
            shard.open_push(header, list(parts.values()), self.membership.settings.deadline_seconds)
            self._pushed_samples[shard.index] = header.samples
            if samples:
                self._owed_samples[shard.index] = 0
            places.append({number: place for place, number in enumerate(parts)})
        return places

    def abandon_push(self) -> list[PushPart]:
        """Break off a push that has no commit yet, and return its parts."""
        for shard in self.shards:
            self._owe(shard)
        return [part for shard in self.shards for part in shard.abandon_push()]

    def _owe(self, shard: ShardClient) -> None:
        """Let the next push to this shard count the samples of the last one, which the shard has not applied."""
        self._owed_samples[shard.index] += self._pushed_samples[shard.index]
        self._pushed_samples[shard.index] = 0

    def await_ack(self) -> PushOutcome:
        """Wait until every part of the last push is acknowledged or refused.

        After a :class:`PatienceError` some part is still unacked: call again to go on.
        """
        outcome = self._outcome = self._outcome or PushOutcome()  # kept where this is interrupted
        for joins in self._joining_again("pushes"):
            for shard in self.shards if joins else ():
                if shard.unacked is not None and shard.unacked.generation != shard.generation:
                    shard.unacked.trace.end(ErrorCode.STALE_GENERATION.name)
                    outcome.refused.append(shard.unacked)
                    shard.unacked = None
                    self._owe(shard)
            waiting = [shard for shard in self.shards if shard.unacked is not None]
            answers = self._each(waiting, lambda shard: shard.await_ack(self.membership.policy()))
            rejoin = [self._take_answer(*each, outcome) for each in zip(waiting, answers, strict=True)]
            if not any(rejoin):
                break
        self._outcome = None
        return outcome

    def _take_answer(self, shard: ShardClient, answer: pb.PushSparseResponse | Rejected, outcome: PushOutcome) -> bool:
        """Add a shard's answer to the outcome of a push; return whether the worker must join again."""
        if isinstance(answer, pb.PushSparseResponse):
            outcome.answers.append(answer)
            if shard is self.membership.coordinator:
                self.progress.acknowledged()
            self.membership.live_workers = max(1, answer.live_workers)
            self.membership.run_finished |= answer.run_state == pb.RUN_STATE_FINISHED
            return False
        if answer.reason is ErrorCode.LEASE_EXPIRED:
            return True  # the same part is repeated after joining
        assert shard.unacked is not None
        outcome.refused.append(shard.unacked)
        shard.unacked = None
        self._owe(shard)
        if answer.reason in REJOIN_REASONS:
            if answer.reason is ErrorCode.VERSION_IN_FUTURE:
                shard.forget_base()
            return True
        if answer.reason is ErrorCode.RUN_FINISHED:
            self.membership.run_finished = True
        elif answer.reason is not ErrorCode.TOO_STALE:
            outcome.error = answer
        return False

    # Pulling

    def pull(self) -> dict[int, PulledReply]:
        """Make the replica the server's model, bit for bit; return the replies by shard.

        After top-k replies the replica lacks the differences that were not sent: then everything is asked for. Where a
        shard does not answer, the replica stays as it was.
        """
        for shard in self.shards:
            if shard.replica_is_image:
                shard.forget_base()
        replies = self.fetch()
        self.apply(replies)
        return replies

    def ask(self, step: int) -> None:
        """Send the requests of the next :meth:`fetch` ahead, behind the committed push of a step."""
        for shard in self.shards:
            with suppress(ValueError):  # a channel that is closed: the fetch reports it
                shard.ask(self.membership.identity, step, self.membership.settings.deadline_seconds)

    def fetch(self) -> dict[int, PulledReply]:
        """Get what the replica lacks from every shard, and change nothing yet; return the replies by shard."""
        done: dict[int, PulledReply] = {}
        for _ in self._joining_again("pulls"):
            current = {index for index, reply in done.items() if reply.generation == self.shards[index].generation}
            waiting = [shard for shard in self.shards if shard.index not in current]
            answers = self._each(waiting, lambda shard: shard.pull(self.membership.identity, self.membership.policy()))
            for shard, answer in zip(waiting, answers, strict=True):
                if isinstance(answer, PulledReply):
                    done[shard.index] = answer
                elif answer.reason not in REJOIN_REASONS:
                    raise from_refusal(answer)
                elif answer.reason is ErrorCode.VERSION_IN_FUTURE:
                    shard.forget_base()
            if not any(isinstance(answer, Rejected) for answer in answers):
                break
        return done

    def apply(self, replies: dict[int, PulledReply]) -> None:
        """Write replies into the replica, but those of a generation that the shard has left since."""
        for index, reply in replies.items():
            shard = self.shards[index]
            if reply.generation != shard.generation:
                continue
            if reply.header.mode == pb.REPLY_MODE_TOPK:
                if not shard.replica_is_image:
                    raise ServerFaultError(f"{shard.address} sent differences to a replica of which it has no image")
                shard.forget_base()  # until all is added: after an interruption nothing may be added a second time
                self.replica.add(reply.segments)
            else:
                self.replica.write(reply.segments)
                if reply.header.image:
                    self.replica.open_fp32(shard.span)
            self.membership.run_finished |= reply.header.run_state == pb.RUN_STATE_FINISHED
            shard.note_applied(reply)

    # Buffers

    @property
    def buffers_travel(self) -> bool:
        """Whether the run averages buffers that this model has."""
        return bool(self.buffers.specs) and self.membership.run_settings.buffer_policy != pb.BUFFER_POLICY_NONE

    def exchange_buffers(self, step: int, samples: int, *, adopt: bool = False) -> int:
        """Contribute this worker's buffers to the average; return the message bytes moved, 0 where there are none.

        ``samples`` have passed through the model since the last exchange. ``adopt`` writes the average over the buffers
        even where the policy leaves each worker its own. Where the lease or the model is lost, nothing is exchanged.
        """
        if not self.buffers_travel:
            return 0
        membership, shard = self.membership, self.membership.coordinator
        tensors, specs = self.buffers.now(), self.buffers.specs
        on_host = [tensor.detach().cpu() for tensor in tensors]
        self._warn_of_nan(on_host)
        data = pack(on_host)
        header = pb.BuffersHeader(
            identity=membership.identity,
            step=step,
            generation=shard.generation,
            samples=samples,
            buffer_bytes=len(data),
        )
        messages = [pb.ExchangeBuffersRequest(header=header)]
        pieces = frames.encode_bytes(data, membership.run_settings.chunk_bytes)
        messages += [pb.ExchangeBuffersRequest(buffers=piece) for piece in pieces]
        moved = sum(frames.wire_bytes(message) for message in messages)

        def attempt(seconds: float) -> bytes:
            nonlocal moved
            reader = frames.BytesReader(packed_bytes(specs), packed_bytes(specs))
            call = shard.connection.stub.ExchangeBuffers(iter(messages), timeout=seconds)
            with shard.connection.tracked(call):
                for response in call:
                    moved += frames.wire_bytes(response)
                    reader.read(response.buffers)
            return reader.finish()

        average = shard.connection.call(membership.policy(), attempt)
        if isinstance(average, Rejected):
            if average.reason not in REJOIN_REASONS:
                raise from_refusal(average) from None
        elif adopt or membership.run_settings.buffer_policy == pb.BUFFER_POLICY_SYNC:
            for tensor, value in zip(tensors, unpack(average, specs), strict=True):
                once = unrepeated(tensor)
                tensor[once].copy_(value[once])
        return moved

    def _warn_of_nan(self, buffers: Sequence[torch.Tensor]) -> None:
        """Say once of each buffer that it is not a number somewhere."""
        for spec, buffer in zip(self.buffers.specs, buffers, strict=True):
            if spec.name not in self._said_nan and bool(buffer.isnan().any()):
                self._said_nan.add(spec.name)
                log.warning(
                    "buffer %s is not a number somewhere, after a batch with NaN, say: such values do not count in the "
                    "run's average, and training goes on. With --buffers sync, the average takes their place",
                    spec.name,
                )

    # The end

    def cancel_unawaited(self) -> None:
        """End the calls of cancelled jobs; waits for nothing, so that any thread may call."""
        for shard in self.shards:
            self._cancelling.submit(shard.connection.cancel_unawaited)

    def cancel_wait(self) -> None:
        """End the wait for other workers soon; waits for nothing."""
        self._cancelling.submit(self.membership.cancel_wait)

    def close(self) -> None:
        """Leave the run and close the channels."""
        self.membership.leave()
        for shard in self.shards:
            shard.close()
        for thread in (*self._threads, self._cancelling):
            thread.close(_CLOSING_SECONDS)

    def _joining_again(self, calls: str) -> Iterator[int]:
        """Yield how often the worker has joined again, and join before each further attempt."""
        for joins in range(_MOST_REJOINS):
            yield joins
            self.membership.join()
        raise LeaseLostError(f"the server takes the worker in and refuses its {calls} again and again")

    def _each(self, shards: Sequence[ShardClient], call: Callable[[ShardClient], Result]) -> list[Result]:
        """Call for every shard in parallel and return the results in order; the first error is raised after all."""
        if len(shards) <= 1:
            return [call(shard) for shard in shards]
        parts = [self._threads[shard.index].submit(partial(call, shard), as_part=True) for shard in shards]
        for part in parts:
            part.wait()
        return [part.result() for part in parts]
