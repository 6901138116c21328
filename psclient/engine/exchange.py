"""What a step consists of, in the order that docs/protocol.md asks for; who calls it, and when, is decided elsewhere.

A step opens a push, sends group after group, commits, settles, fetches the reply and applies it.
:mod:`psclient.engine.step` does all of it in one go; with overlap, :mod:`psclient.engine.overlap` does it while the
model computes.
"""

import time
from collections.abc import Iterable, Mapping, Sequence

import torch

from psclient.buckets.planner import Planner
from psclient.buckets.trace import Trace
from psclient.compress.compressor import Compressor, Tally
from psclient.compress.groups import Rates
from psclient.engine.push import Pusher
from psclient.errors import from_refusal
from psclient.report import StepReport
from psclient.rpc.cluster import Cluster
from psclient.rpc.shard import PulledReply, PushPart
from pscore.model.segment import entries
from pscore.telemetry import tracing
from pscore.telemetry.span import NO_SPAN
from pscore.wire.v1 import parameter_server_pb2 as pb

Replies = dict[int, PulledReply]


class Exchange:
    """Pushes and pulls of one worker.

    Args:
        cluster: where to.
        pusher: cuts and encodes.
        compressor: selects, and takes back what did not arrive.
        planner: which tensors go together; learns what that costs.

    Attributes:
        step: the last step that was begun.
        acknowledged_step: the last one that some shard has applied.
        refused: parts of pushes that went back into the residual, so far.
    """

    def __init__(self, cluster: Cluster, pusher: Pusher, compressor: Compressor, planner: Planner) -> None:
        """Begin at step 0."""
        self.step = 0
        self.acknowledged_step = 0
        self.refused = 0
        self._cluster = cluster
        self._pusher = pusher
        self._compressor = compressor
        self._planner = planner
        self._trace = Trace(pusher.groups, 0.0)
        self._committed = self._settling = 0.0
        self._opened_trace = self._settled_trace = NO_SPAN  # two: with overlap a push may open before the last reply

    @property
    def groups(self) -> Sequence[range]:
        """The positions of each group's tensors, in the order of sending."""
        return self._pusher.groups

    @property
    def in_doubt(self) -> bool:
        """True while the last push is not settled."""
        return self._cluster.has_unacked

    def open(self, samples: int, rates: Rates) -> StepReport:
        """Begin the push of a new step; the last one must be settled."""
        self.step = max(self.step + 1, self._cluster.membership.first_step)
        self._trace = Trace(self.groups, time.perf_counter())
        self._opened_trace = tracing.begin_step(step=self.step, worker=self._cluster.membership.identity.worker_id)
        with self._opened_trace.active():
            self._pusher.open(self.step, samples, rates)
        return StepReport(self.step)

    def regroup(self) -> None:
        """Between two steps: cut the next push as the planner says."""
        if self._planner.advance():
            self._pusher.regroup(self._planner.groups)

    def begin_group(self, number: int) -> None:
        """Note that work on a group of the open push begins."""
        self._trace.begun.setdefault(number, time.perf_counter())

    def note_gradients(self, moments: Mapping[int, float]) -> None:
        """Note when the gradients of the open push were ready, by position; left out where all were there before."""
        self._trace.ready = moments

    def send_gradients(
        self, report: StepReport, number: int, gradients: Mapping[int, torch.Tensor], scale: float
    ) -> None:
        """Accumulate the gradients of a group (finite, by position) times ``scale``, select, and send the selected."""
        tally = Tally()
        self.begin_group(number)
        with self._opened_trace.active():
            with report.timed("select"):
                sent = self._compressor.compress(self.groups[number], gradients, scale, tally)
            report.wanted_entries += tally.wanted
            report.selected_entries += tally.selected
            self._compressor.give_back(self._pusher.send(report, number, sent))
        self._trace.entries.update((position, entry.values.numel()) for position, entry in sent)
        self._trace.elements.update((position, gradients[position].numel()) for position, _ in sent)
        self._trace.done[number] = time.perf_counter()

    def send_held(self, report: StepReport, number: int) -> None:
        """Send everything that the tensors of a group hold, in fp32: a flush must leave nothing behind."""
        with self._opened_trace.active():
            with report.timed("select"):
                sent = self._compressor.empty(self.groups[number])
            self._pusher.send(report, number, sent, exact=True)

    def commit(self, report: StepReport) -> None:
        """End the push; it is in doubt from now on."""
        self._pusher.commit(report)
        self._committed = time.perf_counter()

    def abandon(self) -> None:
        """Break off a push that has no commit yet; what was taken out goes back."""
        self.give_back(self._cluster.abandon_push())
        self._opened_trace.end("abandoned")

    def settle(self, report: StepReport) -> None:
        """Wait until each part of the push is acknowledged or refused, and take back what was refused.

        Raises:
            ServerUnreachableError: some part is still in doubt; call again to go on.
            SparsepsError: a server refused for a reason that joining again does not mend; everything is taken back.
        """
        self._settling = self._committed
        self._settled_trace = self._opened_trace
        outcome = self._cluster.await_ack()
        self.give_back(outcome.refused)
        report.refused = len(outcome.refused)
        self.refused += report.refused
        self._trace.answered = time.perf_counter()
        if outcome.answers:
            self.acknowledged_step = self.step
            report.staleness = max(answer.staleness for answer in outcome.answers.values())
            report.applied_scale = min(answer.applied_scale or 1.0 for answer in outcome.answers.values())
        if len(outcome.answers) == len(self._pusher.places):
            shards = zip(self._pusher.places, self._cluster.timings, strict=True)
            self._trace.shards = tuple(shards)
            self._planner.learn(self._trace)
        if outcome.error is not None:
            raise from_refusal(outcome.error) from None

    def fetch(self) -> Replies:
        """Get what the replica lacks from every shard, and change nothing yet.

        Raises:
            ServerUnreachableError: some shard did not answer.
        """
        with self._settled_trace.active():
            return self._cluster.fetch()

    def apply(self, report: StepReport, replies: Replies) -> None:
        """Write the replies into the parameters and count them."""
        with self._settled_trace.active(), report.timed("apply"):
            self._cluster.apply(replies)
        self.count(report, replies)
        self._settled_trace.note(version=report.version, staleness=report.staleness)
        self._settled_trace.end()

    def count(self, report: StepReport, replies: Replies) -> None:
        """Count replies that have been applied."""
        first = replies[0].header
        report.version = first.version
        report.reply_mode = "topk" if first.mode == pb.REPLY_MODE_TOPK else "exact"
        report.changed_density = first.changed_density
        report.pull_bytes = sum(reply.bytes for reply in replies.values())
        report.pull_entries = sum(entries(reply.segments) for reply in replies.values())
        if self._settling:  # a push has been answered
            report.round_trip_seconds = max(reply.arrived for reply in replies.values()) - self._settling

    def held_parts(self) -> list[PushPart]:
        """Return the parts of an unsettled push that are in doubt, or refused and not handed back."""
        return self._cluster.held_parts()

    def give_back(self, parts: Iterable[PushPart]) -> None:
        """Give the payload of parts that were not applied back to the memories that they came from."""
        self._compressor.give_back(segment for part in parts for segment in part.segments)
