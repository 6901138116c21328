"""A worker's push and pull, in the order of docs/reference/protocol.md: open, send groups, commit, await, fetch, apply.

:mod:`psclient.engine.step` decides when; with overlap, :mod:`psclient.engine.overlap` does so while the model computes.
"""

import time
from collections.abc import Iterable, KeysView, Sequence
from dataclasses import replace

import torch

from psclient.compress.compressor import Compressor
from psclient.compress.gradients import Gradients, Scale
from psclient.compress.grouping import Grouping
from psclient.compress.groups import Rates
from psclient.compress.table import Sent
from psclient.engine.mgs import MergedGradients
from psclient.errors import from_refusal
from psclient.report import StepReport
from psclient.rpc.cluster import Cluster
from psclient.rpc.push_part import PushPart
from psclient.rpc.shard_client import PulledReply
from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice, entries, merge
from pscore.telemetry import tracing
from pscore.telemetry.span import NO_SPAN
from pscore.wire import frames
from pscore.wire.dense import dense_chunks
from pscore.wire.v1 import parameter_server_pb2 as pb

Replies = dict[int, PulledReply]


class PushPull:
    """The pushes and pulls of one worker; a push is sent in groups of tensors, each cut by shards.

    ``step`` was begun last, ``acknowledged_step`` applied last by some shard; ``refused`` counts parts of pushes.
    ``merged`` measures, and chooses the groups, if that was asked for.
    """

    def __init__(
        self,
        layout: ModelLayout,
        cluster: Cluster,
        compressor: Compressor,
        grouping: Grouping,
        merged: MergedGradients | None,
    ) -> None:
        self.step = self.acknowledged_step = self.refused = 0
        self.merged, self._grouping = merged, grouping
        self._layout, self._cluster, self._compressor = layout, cluster, compressor
        self._spans: list[Span] = []  # of the groups of the push that was opened last
        self._places: list[dict[int, int]] = []  # of these groups in each shard's plan
        self._committed_at = self._awaited_commit_at = 0.0
        self._opened_span = self._awaited_span = NO_SPAN  # two: with overlap a push may open before the last reply

    @property
    def groups(self) -> Sequence[range]:
        """The positions of each group's tensors, in the order of sending."""
        return self._grouping.groups

    @property
    def next_step(self) -> int:
        """The number of the push that opens next; a worker that comes back goes on from the last one of its name."""
        return max(self.step + 1, self._cluster.membership.first_step)

    def open(self, samples: int, rates: Rates) -> StepReport:
        """Begin the push of a new step at every shard; the last push must be answered."""
        self.step = self.next_step
        if self.merged is not None:
            self.merged.opened()
        offsets = self._layout.offsets
        self._spans = [Span(offsets[group.start], offsets[group.stop]) for group in self.groups]
        self._opened_span = tracing.begin_step(step=self.step, worker=self._cluster.membership.identity.worker_id)
        with self._opened_span.active():
            self._places = self._cluster.open_push(self.step, samples, rates, self._spans)
        return StepReport(self.step)

    def selects_before_opening(self, positions: KeysView[int]) -> bool:
        """Return whether the first group's selection tells if gradients at these positions are sound."""
        return self._compressor.on_one_device and not positions.isdisjoint(self.groups[0])

    def select(self, report: StepReport, gradients: Gradients, scale: Scale, number: int = 0) -> Sent:
        """Accumulate the gradients of a group (by position) times ``scale``, and select."""
        with report.timed("select"):
            return self._compressor.compress(self.groups[number], gradients, scale, report)

    def send_gradients(
        self, report: StepReport, number: int, gradients: Gradients, scale: Scale, sent: Sent | None = None
    ) -> None:
        """Accumulate the gradients of a group (finite, by position) times ``scale``, select, and send the selected.

        ``sent``: what :meth:`select` has selected of this group before the push was opened.
        """
        with self._opened_span.active():
            sent = sent or self.select(report, gradients, scale, number)
            self._send(report, number, sent.slices)
        if self.merged is not None:
            self.merged.sent(number, sent.entries)

    def send_residuals(self, report: StepReport, number: int) -> None:
        """Send the residuals of a group whole, in fp32: a flush must leave nothing behind."""
        with self._opened_span.active():
            with report.timed("select"):
                sent = self._compressor.take_residuals(self.groups[number])
            self._send(report, number, sent, exact=True)

    def _send(self, report: StepReport, number: int, sent: Iterable[SparseSlice], *, exact: bool = False) -> None:
        """Encode a group's entries, and pass the chunks to the transport; quantisation errors are restored.

        After an error the shards know all of these entries, for :meth:`abandon`.
        """
        segments = _joined(self._spans[number], sent)
        waiting = [
            (shard, places[number], part)
            for shard, places in zip(self._cluster.shards, self._places, strict=True)
            for segment in segments
            if (part := segment.clip(shard.span)) is not None
        ]
        chunk_bytes = self._cluster.membership.run_settings.chunk_bytes
        for index, (shard, place, part) in enumerate(waiting):
            try:
                with report.timed("encode"):
                    form = replace(shard.push_form, value=pb.VALUE_CODEC_FP32) if exact else shard.push_form
                    part = part if exact else shard.in_fewest_bytes(part)
                    is_exact = form.value == pb.VALUE_CODEC_FP32
                    chunks: list[tuple[pb.Chunk, memoryview] | tuple[pb.Chunk]]
                    if is_exact and part.offsets is None and part.values.dtype == torch.float32:
                        chunks, arriving, lost = list(dense_chunks(part, chunk_bytes, place)), part, None
                    else:
                        encoded = list(frames.encode(part, form, chunk_bytes=chunk_bytes, group=place))
                        arriving, lost = (part, None) if is_exact else _as_decoded(part, encoded)
                        chunks = [(chunk,) for chunk, _ in encoded]
            except BaseException:
                for shard, _, part in waiting[index:]:
                    shard.hold(part)
                raise
            shard.hold(arriving)
            if lost is not None:
                self._compressor.restore([lost])
            report.push_entries += part.entries
            with report.timed("send"):
                for chunk in chunks:
                    shard.send_chunk(*chunk)

    def commit(self, report: StepReport) -> None:
        """End the push at every shard; from now on only an answer says whether it was applied."""
        for shard in self._cluster.shards:
            report.push_bytes += shard.send_commit()
        self._committed_at = time.perf_counter()

    def ask(self) -> None:
        """Ask for the reply to the committed push ahead of its answer; :meth:`fetch` reads the reply."""
        with self._opened_span.active():
            self._cluster.ask(self.step)

    def abandon(self) -> None:
        """Break off a push that has no commit yet, and restore what was selected."""
        self.restore(self._cluster.abandon_push())
        self._opened_span.end("abandoned")

    def await_ack(self, report: StepReport) -> None:
        """Wait until each part of the push is acknowledged or refused, and restore what was refused.

        After :class:`PatienceError` some part has no answer: call again. After another error all is restored.
        """
        self._awaited_commit_at, self._awaited_span = self._committed_at, self._opened_span
        outcome = self._cluster.await_ack()
        self.restore(outcome.refused)
        report.refused = len(outcome.refused)
        self.refused += report.refused
        if outcome.answers:
            self.acknowledged_step = self.step
            report.version = report.version or outcome.answers[0].version  # a flush has no reply that tells it
            report.staleness = max(answer.staleness for answer in outcome.answers)
            report.applied_scale = min(answer.applied_scale or 1.0 for answer in outcome.answers)
        if self.merged is not None and len(outcome.answers) == len(self._places):
            pairs = zip(self._places, self._cluster.shards, strict=True)
            self.merged.answered([(places, shard.group_bytes, shard.group_arrivals) for places, shard in pairs])
        if outcome.error is not None:
            raise from_refusal(outcome.error) from None

    def fetch(self) -> Replies:
        """Fetch the changes that the replica lacks from every shard; change nothing yet."""
        with self._awaited_span.active():
            return self._cluster.fetch()

    def apply(self, report: StepReport, replies: Replies) -> None:
        """Write the replies into the parameters and count them."""
        with self._awaited_span.active(), report.timed("apply"):
            self._cluster.apply(replies)
        self.count(report, replies)
        self._awaited_span.note(version=report.version, staleness=report.staleness)
        self._awaited_span.end()

    def count(self, report: StepReport, replies: Replies) -> None:
        """Count replies that have been applied."""
        first = replies[0].header
        report.version = first.version
        report.reply_mode = "topk" if first.mode == pb.REPLY_MODE_TOPK else "exact"
        report.changed_density = first.changed_density
        report.pull_bytes = sum(reply.bytes for reply in replies.values())
        report.pull_entries = sum(entries(reply.segments) for reply in replies.values())
        if self._awaited_commit_at:  # a push has been answered
            report.round_trip_seconds = max(reply.arrived for reply in replies.values()) - self._awaited_commit_at

    def unacked_parts(self) -> list[PushPart]:
        """Return the parts of the last push that have no answer, or were refused and are not restored."""
        return self._cluster.held_parts()

    def restore(self, parts: Iterable[PushPart]) -> None:
        """Add parts that were not applied to the residuals again."""
        self.put_back(segment for part in parts for segment in part.segments)

    def put_back(self, selected: Iterable[SparseSlice]) -> None:
        """Add entries that were not sent to the residuals again."""
        self._compressor.restore(selected)


def _joined(span: Span, sent: Iterable[SparseSlice]) -> list[SparseSlice]:
    """Return a group's entries as one sparse segment, or as its dense runs."""
    found = [segment for segment in sent if segment.entries]
    if len({segment.values.device for segment in found}) > 1:  # a model spread over devices meets on the host
        found = [segment.cpu() for segment in found]
    sparse = any(segment.offsets is not None for segment in found)
    if sparse and len(found) == 1 and found[0].span == span:
        return found
    found.sort(key=lambda segment: segment.span.start)
    runs: list[list[SparseSlice]] = []
    for segment in found:
        if runs and (sparse or runs[-1][-1].span.end == segment.span.start):
            runs[-1].append(segment)
        else:
            runs.append([segment])
    spans = [span] if sparse else [Span(run[0].span.start, run[-1].span.end) for run in runs]
    joined = [one for span, run in zip(spans, runs, strict=True) if (one := merge(span, run)) is not None]
    return [_ascending(one) for one in joined] if sparse and len(found) > 1 else joined


def _ascending(segment: SparseSlice) -> SparseSlice:
    """Sort a segment's entries: those of tensors of one device may lie between those of another."""
    assert segment.offsets is not None
    order = segment.offsets.argsort()
    return SparseSlice(segment.span, segment.offsets[order], segment.values[order])


def _as_decoded(part: SparseSlice, encoded: Sequence[frames.Encoded]) -> tuple[SparseSlice, SparseSlice | None]:
    """Return the part as the server will decode it, and the quantisation error where there is one."""
    decoded = [piece.decoded for piece in encoded]
    values = (decoded[0] if len(decoded) == 1 else torch.cat(decoded)).to(part.values.device)
    arriving, error = SparseSlice(part.span, part.offsets, values), part.values - values
    lossy = int(torch.count_nonzero(error))
    if (
        part.offsets is None or 2 * lossy > error.numel()
    ):  # to find most of the entries costs more than zeros among them
        return arriving, SparseSlice(part.span, part.offsets, error) if lossy else None
    where = error.nonzero().view(-1)
    return arriving, SparseSlice(part.span, part.offsets[where], error[where]) if lossy else None
