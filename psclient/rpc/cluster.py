"""All shards together: pushing and pulling in parallel, and what to do when something is refused or lost.

The rules are those of docs/protocol.md; this file is where a worker follows them.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from psclient.buckets.trace import PushTiming
from psclient.compress.groups import Rates
from psclient.data.tracker import SampleTracker
from psclient.errors import LeaseLostError, ModelChangedError, ModelLoadedError, ServerFaultError, from_refusal
from psclient.executor import SerialExecutor
from psclient.model.module import NamedBuffers
from psclient.model.replica import Replica
from psclient.rpc.buffers import BufferExchange
from psclient.rpc.membership import Membership
from psclient.rpc.shard import REJOIN_REASONS, PulledReply, PushPart, ShardClient
from psclient.settings import OnLoad
from pscore.model.layout import Span
from pscore.names import shown
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb

log = logging.getLogger("psclient")

Result = TypeVar("Result")

_CLOSING_SECONDS = 1.0
_MOST_REJOINS = 20  # in one step; each may wait, so this is a guard against a loop, not a time limit


@dataclass
class PushOutcome:
    """What became of the parts of a push."""

    answers: dict[int, pb.PushSparseResponse] = field(default_factory=dict)
    """Acknowledged parts, by shard."""
    refused: list[PushPart] = field(default_factory=list)
    """Refused parts, whose payload must go back into the residual."""
    error: Rejected | None = None
    """A refusal that is the caller's fault and should be raised once the payload is back."""


class Cluster:
    """The servers of one run, for one worker: pushes to all, pulls from all.

    Args:
        shards: every shard's client, in order.
        membership: this worker's place there.
        replica: the model.
        buffers: the model's persistent buffers, in layout order.

    Attributes:
        progress: what has become of the samples that this worker was handed.
    """

    def __init__(
        self,
        shards: Sequence[ShardClient],
        membership: Membership,
        replica: Replica,
        buffers: NamedBuffers,
    ) -> None:
        """Give each shard its span."""
        self.shards = tuple(shards)
        self.membership = membership
        self.exchange = BufferExchange(buffers)
        self.progress = SampleTracker()
        self._replica = replica
        for shard, span in zip(self.shards, replica.layout.shard_spans(len(self.shards)), strict=True):
            shard.span = span
        self._outcome: PushOutcome | None = None
        # One thread a shard, where there are several; daemons, so that they still work when the interpreter ends.
        self._threads = (
            [SerialExecutor(f"psclient-{shard.index}") for shard in self.shards] if len(self.shards) > 1 else []
        )
        self._cutting = SerialExecutor("psclient-cut")

    @property
    def in_doubt(self) -> bool:
        """True while the last push is not settled: a part is in doubt, or a refused one has not been handed back."""
        return self._outcome is not None or any(shard.in_doubt is not None for shard in self.shards)

    def held_parts(self) -> list[PushPart]:
        """Return the parts of an unsettled push that are in doubt, or refused and not handed back."""
        refused = self._outcome.refused if self._outcome is not None else []
        return refused + [shard.in_doubt for shard in self.shards if shard.in_doubt is not None]

    # The model

    def loaded_tensor(self) -> str | None:
        """Return the name of a parameter that somebody else has written to since the last reply; costs next to nothing.

        Raises:
            ModelChangedError: a parameter, or a buffer that travels, has another dtype, shape or device.
        """
        name = self._replica.loaded()
        if self._buffers_travel:
            self.exchange.buffers.now()
        return name

    def accept_model(self) -> None:
        """Take the parameters as they are for what the server knows."""
        self._replica.accept()

    def digest(self) -> bytes:
        """See :meth:`Replica.digest`."""
        return self._replica.digest()

    @property
    def replica_is_intact(self) -> bool:
        """Whether a reply can be applied to the replica."""
        try:
            return self._replica.loaded() is None
        except ModelChangedError:
            return False

    def offer_model(self, tensor: str, digest: bytes, on_load: OnLoad, *, drops: bool = False) -> None:
        """Offer the parameters to the server in the place of its own; a pull brings what is left to be brought.

        Args:
            tensor: one that was written to.
            digest: that of the parameters.
            on_load: see :class:`~psclient.settings.ClientSettings`.
            drops: whether to drop them rather than raise.

        Raises:
            ModelLoadedError: the server's model has been trained, and nobody has said which of the two is to stay.
        """
        membership = self.membership
        before = membership.coordinator.generation
        offered = membership.join(pb.LoadedModel(digest=digest, replaces=on_load == "replace"))
        if not offered and on_load == "error" and not drops:
            raise ModelLoadedError(tensor, membership.identity.run_id, membership.version)
        if not offered:
            log.warning(
                "the model that was loaded is dropped, as %s says: run %s goes on from its own, at version %d",
                'on_load="server"' if on_load == "server" else "pull()",
                shown(membership.identity.run_id),
                membership.version,
            )
        self._replica.accept()
        if membership.coordinator.generation == before or not all(shard.has_base for shard in self.shards):
            for shard in self.shards:
                shard.forget_base()

    @property
    def _buffers_travel(self) -> bool:
        return bool(self.exchange.buffers.specs) and (
            self.membership.run_settings.buffer_policy != pb.BUFFER_POLICY_NONE
        )

    # Pushing and pulling

    def open_push(self, step: int, samples: int, rates: Rates, groups: Sequence[Span]) -> list[dict[int, int]]:
        """Begin a push at every shard; return, for each shard, which place each group has in its plan."""
        places = []
        finished = self.progress.open_push(samples)
        for shard in self.shards:
            parts = {number: group.intersect(shard.span) for number, group in enumerate(groups)}
            parts = {number: part for number, part in parts.items() if part.length}
            told = finished if shard is self.membership.coordinator else []
            shard.open_push(self.membership.identity, step, samples, rates, list(parts.values()), told)
            places.append({number: place for place, number in enumerate(parts)})
        return places

    @property
    def timings(self) -> list[PushTiming]:
        """When the groups of the last push left and arrived, by shard."""
        return [shard.timing for shard in self.shards]

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
            answers = self._each(waiting, lambda shard: shard.settle(self.membership.patience(shard)))
            if self._sort_answers(waiting, answers, outcome):
                self.membership.join()
                for shard in self.shards:
                    if shard.in_doubt is not None and shard.in_doubt.generation != shard.generation:
                        shard.in_doubt.trace.end(ErrorCode.STALE_GENERATION.name)
                        outcome.refused.append(shard.in_doubt)
                        shard.in_doubt = None
        raise LeaseLostError("the server takes the worker in and refuses its pushes again and again")

    def _sort_answers(
        self,
        waiting: Sequence[ShardClient],
        answers: Sequence[pb.PushSparseResponse | Rejected | None],
        outcome: PushOutcome,
    ) -> bool:
        """File each answer; tell whether the worker must join again."""
        rejoin = False
        for shard, answer in zip(waiting, answers, strict=True):
            if isinstance(answer, pb.PushSparseResponse):
                outcome.answers[shard.index] = answer
                if shard is self.membership.coordinator:
                    self.progress.acknowledged()
                self.membership.live_workers = max(1, answer.live_workers)
                self.membership.run_finished |= answer.run_state == pb.RUN_STATE_FINISHED
                continue
            if not isinstance(answer, Rejected) or shard.in_doubt is None:
                continue
            rejoin |= answer.reason in REJOIN_REASONS
            if answer.reason is ErrorCode.LEASE_EXPIRED:
                continue  # the same part is repeated after joining
            outcome.refused.append(shard.in_doubt)
            shard.in_doubt = None
            if answer.reason is ErrorCode.VERSION_IN_FUTURE:
                shard.forget_base()
            if answer.reason is ErrorCode.RUN_FINISHED:
                self.membership.run_finished = True
            elif answer.reason not in REJOIN_REASONS and answer.reason is not ErrorCode.TOO_STALE:
                outcome.error = answer
        return rejoin

    def pull(self) -> dict[int, PulledReply]:
        """Make the replica the server's model, bit for bit; return the replies by shard.

        After top-k replies it lacks the differences that were not sent: then everything is asked for.

        Raises:
            ServerUnreachableError: some shard did not answer; the replica is whole, and older there.
        """
        for shard in self.shards:
            if shard.replica_is_image:
                shard.forget_base()
        return self.fetch(self.apply)

    def fetch(self, arrived: Callable[[dict[int, PulledReply]], None] | None = None) -> dict[int, PulledReply]:
        """Get what the replica lacks from every shard; return the replies by shard.

        Args:
            arrived: called with each round of replies as they come; without it nothing is changed before
                :meth:`apply`.

        Raises:
            ServerUnreachableError: some shard did not answer.
        """
        done: dict[int, PulledReply] = {}
        for _ in range(_MOST_REJOINS):
            waiting = [shard for shard in self.shards if shard.index not in done]
            if not waiting:
                return done
            answers = self._each(
                waiting, lambda shard: shard.pull(self.membership.identity, self.membership.patience(shard))
            )
            rejoin = False
            for shard, answer in zip(waiting, answers, strict=True):
                if isinstance(answer, PulledReply):
                    done[shard.index] = answer
                    if arrived is not None:
                        arrived({shard.index: answer})
                elif answer.reason in REJOIN_REASONS:
                    rejoin = True
                    if answer.reason is ErrorCode.VERSION_IN_FUTURE:
                        shard.forget_base()
                else:
                    raise from_refusal(answer)
            if rejoin:
                self.membership.join()
        raise LeaseLostError("the server takes the worker in and refuses its pulls again and again")

    def apply(self, replies: dict[int, PulledReply]) -> None:
        """Write fetched replies into the replica.

        A reply of a generation that the shard has left since is dropped: the next pull asks for everything.
        """
        for index, reply in replies.items():
            shard = self.shards[index]
            if reply.generation != shard.generation:
                continue
            if reply.header.mode == pb.REPLY_MODE_TOPK:
                if not shard.replica_is_image:
                    raise ServerFaultError(f"{shard.address} sent differences to a replica of which it has no image")
                shard.forget_base()  # until all is added: after an interruption nothing may be added a second time
                self._replica.add(reply.segments)
            else:
                self._replica.write(reply.segments)
                if reply.header.image:
                    self._replica.open_fp32(shard.span)
            self.membership.run_finished |= reply.header.run_state == pb.RUN_STATE_FINISHED
            shard.applied(reply)

    # Buffers and the end

    def exchange_buffers(self, step: int, samples: int, *, adopt: bool = False) -> int:
        """Contribute this worker's buffers to the average; return the message bytes moved, 0 where there are none.

        Args:
            step: the worker's step.
            samples: samples that the buffers have seen since the last exchange; 0 contributes nothing.
            adopt: take the average over even where the policy leaves each worker its own (after joining).
        """
        membership = self.membership
        if not self._buffers_travel:
            return 0
        adopt = adopt or membership.run_settings.buffer_policy == pb.BUFFER_POLICY_SYNC
        header = pb.BuffersHeader(
            identity=membership.identity, step=step, generation=membership.coordinator.generation, samples=samples
        )
        patience = membership.patience(membership.coordinator)
        chunk_bytes = membership.run_settings.chunk_bytes
        return self.exchange.run(membership.coordinator, header, patience, chunk_bytes=chunk_bytes, adopt=adopt)

    def cut(self) -> None:
        """End the calls for whose answers nobody waits any longer; waits for nothing, so that any thread may call."""
        self._cutting.submit(self._cut)

    def close(self) -> None:
        """Leave the run and close the channels."""
        self.membership.leave()
        for shard in self.shards:
            shard.close()
        for thread in (*self._threads, self._cutting):
            thread.close(_CLOSING_SECONDS)

    # Inner parts

    def _each(self, shards: Sequence[ShardClient], call: Callable[[ShardClient], Result]) -> list[Result]:
        """Call for every shard in parallel and return the results in order; the first error is raised after all."""
        if len(shards) == 1:
            return [call(shards[0])]
        parts = [self._threads[shard.index].submit(partial(call, shard), as_part=True) for shard in shards]
        for part in parts:
            part.wait()
        return [part.result() for part in parts]

    def _cut(self) -> None:
        for shard in self.shards:
            shard.connection.cut()
