"""Streaming a push: groups in backward order, each cut by shards, encoded and handed over when it is ready."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from psclient.compress.groups import Rates
from psclient.compress.method import Sent
from psclient.report import StepReport
from psclient.rpc.cluster import Cluster
from pscore.model.layout import ModelLayout, Span
from pscore.model.segment import Segment, merge
from pscore.wire import frames
from pscore.wire.v1 import parameter_server_pb2 as pb


class Pusher:
    """Turns what each tensor sends into one push at every shard.

    Args:
        layout: where the tensors lie.
        cluster: where to push.
        groups: the positions of each group's tensors, last group first as its gradients come first.

    Attributes:
        groups: these, or those of the last :meth:`regroup`.
        places: for each shard, which place each group has in the plan of the push that was opened last.
    """

    def __init__(self, layout: ModelLayout, cluster: Cluster, groups: Sequence[range]) -> None:
        """Take the groups."""
        self._cluster = cluster
        self._layout = layout
        self.places: list[dict[int, int]] = []
        self.regroup(groups)

    def regroup(self, groups: Sequence[range]) -> None:
        """Cut the pushes to come into these groups; not while one is open."""
        offsets = self._layout.offsets
        self.groups = groups
        self._spans = [Span(offsets[group.start], offsets[group.stop]) for group in groups]

    def open(self, step: int, samples: int, rates: Rates) -> None:
        """Begin a push at every shard."""
        self.places = self._cluster.open_push(step, samples, rates, self._spans)

    def send(
        self, report: StepReport, number: int, sent: Sequence[tuple[int, Sent]], *, exact: bool = False
    ) -> list[Segment]:
        """Encode what the tensors of a group send and hand it to the transport.

        Args:
            report: takes bytes, entries and times.
            number: which group.
            sent: (position, what it sends), ascending.
            exact: let values travel in fp32.

        Returns:
            What quantisation has taken from it, and must go back where it came from. Where this fails, everything is
            held by then for :meth:`Cluster.abandon_push` to return.
        """
        lost: list[Segment] = []
        chunk_bytes = self._cluster.membership.run_settings.chunk_bytes
        segments = self._merge(self._spans[number], sent)
        waiting = [
            (shard, places[number], part)
            for shard, places in zip(self._cluster.shards, self.places, strict=True)
            for segment in segments
            if (part := segment.clip(shard.span)) is not None
        ]
        while waiting:
            shard, place, part = waiting[0]
            try:
                with report.timed("encode"):
                    form = replace(shard.push_form, value=pb.VALUE_CODEC_FP32) if exact else shard.push_form
                    encoded = list(frames.encode(part, form, chunk_bytes=chunk_bytes, group=place))
                    arriving = _arriving(part, encoded)
                    lost += _lost(part, arriving)
            except BaseException:
                for shard, _, part in waiting:
                    shard.hold(part)
                raise
            waiting.pop(0)
            shard.hold(arriving)
            report.push_entries += part.entries
            with report.timed("send"):
                for chunk, _ in encoded:
                    shard.send_chunk(chunk)
        return lost

    def commit(self, report: StepReport) -> None:
        """End the push at every shard; it is in doubt from now on."""
        for shard in self._cluster.shards:
            report.push_bytes += shard.send_commit()

    def _merge(self, span: Span, sent: Sequence[tuple[int, Sent]]) -> list[Segment]:
        """Return a group's entries as one sparse segment, or as its dense runs."""
        found = [
            Segment(self._layout.span(position), entry.offsets, entry.values)
            for position, entry in sent
            if entry.values.numel()
        ]
        if not found:
            return []
        if len({segment.values.device for segment in found}) > 1:  # a model spread over devices meets on the host
            found = [segment.cpu() for segment in found]
        if any(segment.offsets is not None for segment in found):
            merged = merge(span, found)
            return [] if merged is None else [merged]
        return list(_runs(found))


def _arriving(part: Segment, encoded: Sequence[frames.Encoded]) -> Segment:
    """Return the part as the server will decode it."""
    values = [piece.decoded for piece in encoded]
    return Segment(
        part.span, part.offsets, (values[0] if len(values) == 1 else torch.cat(values)).to(part.values.device)
    )


def _lost(part: Segment, arriving: Segment) -> Iterator[Segment]:
    """Yield the difference between what was to be sent and what arrives, where there is one."""
    error = part.values - arriving.values
    if part.offsets is None:
        if bool(error.any()):
            yield Segment(part.span, None, error)
        return
    where = error.nonzero().view(-1)
    if where.numel():
        yield Segment(part.span, part.offsets[where], error[where])


def _runs(found: Sequence[Segment]) -> Iterator[Segment]:
    """Join dense neighbours."""
    runs: list[list[Segment]] = [[found[0]]]
    for segment in found[1:]:
        if runs[-1][-1].span.end == segment.span.start:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    for run in runs:
        yield Segment(Span(run[0].span.start, run[-1].span.end), None, torch.cat([part.values for part in run]))
