"""Streaming a push: groups in backward order, each cut by shards, encoded and handed over when it is ready."""

from collections.abc import Callable, Iterator, Sequence

import torch

from psclient.cluster import Cluster, PushOutcome
from psclient.methods.base import Sent
from psclient.report import StepReport
from psclient.shard import PushPart
from pscore import frames
from pscore.codecs.values import CODEC_OF_DTYPE
from pscore.layout import ModelLayout, Span
from pscore.segment import Segment, merge


class Pusher:
    """Turns what each tensor sends into one push at every shard.

    Args:
        layout: where the tensors lie.
        cluster: where to push.
        value_dtype: how values travel; they have been rounded to it already.
        group_elements: neighbouring tensors are merged into groups of about this many elements.
    """

    def __init__(self, layout: ModelLayout, cluster: Cluster, value_dtype: torch.dtype, group_elements: int) -> None:
        """Plan the groups."""
        self._layout = layout
        self._cluster = cluster
        self._form = frames.WireForm(value=CODEC_OF_DTYPE[value_dtype])
        self.groups = merge_groups(layout.offsets, group_elements)

    def push(
        self,
        report: StepReport,
        samples: int,
        sent_by: Callable[[int], Sent | None],
        give_back: Callable[[Sequence[PushPart]], None],
    ) -> PushOutcome:
        """Stream what every tensor sends and settle the push.

        Args:
            report: takes bytes, entries and times; its step is the push's.
            samples: samples behind this push.
            sent_by: compresses the tensor at a position of the layout; ``None`` where it sends nothing.
            give_back: called with what was cut out already if this breaks off before the commit.

        Raises:
            ServerUnreachableError: the push is in doubt; ``cluster.settle()`` goes on.
        """
        cluster = self._cluster
        chunk_bytes = cluster.membership.run_settings.chunk_bytes
        spans = [Span(self._layout.offsets[group.start], self._layout.offsets[group.stop]) for group in self.groups]
        try:
            plans = cluster.open_push(report.step, samples, spans)
            for number, positions in enumerate(self.groups):
                with report.timed("select"):
                    segments = self._select(positions, spans[number], sent_by)
                for shard, plan in zip(cluster.shards, plans, strict=True):
                    for segment in segments:
                        part = segment.clip(shard.span)
                        if part is None:
                            continue
                        shard.hold(part)
                        report.push_entries += part.entries
                        with report.timed("encode"):
                            encoded = list(frames.encode(part, self._form, chunk_bytes=chunk_bytes, group=plan[number]))
                        with report.timed("send"):
                            for chunk, _ in encoded:
                                shard.send_chunk(chunk)
            for shard in cluster.shards:
                report.push_bytes += shard.send_commit()
        except BaseException:
            give_back(cluster.abandon_push())
            raise
        with report.timed("wait"):
            return cluster.settle()

    def payloads(self, parts: Sequence[PushPart]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (position, fp32 ``[n]``) of every tensor with entries in ``parts``, zero where there are none."""
        found: dict[int, torch.Tensor] = {}
        for part in parts:
            for segment in part.segments:
                for position, common in self._layout.overlapping(segment.span):
                    piece = segment.clip(common)
                    if piece is None:
                        continue
                    span = self._layout.span(position)
                    payload = found.setdefault(position, torch.zeros(span.length, device=piece.values.device))
                    window = payload[common.start - span.start : common.end - span.start]
                    if piece.offsets is None:
                        window.add_(piece.values)
                    else:
                        window.index_add_(0, piece.offsets, piece.values)
        yield from found.items()

    def _select(self, positions: range, span: Span, sent_by: Callable[[int], Sent | None]) -> list[Segment]:
        """Compress the tensors of a group; return one sparse segment, or its dense runs."""
        found: list[Segment] = []
        for position in positions:
            sent = sent_by(position)
            if sent is not None and sent.values.numel():
                found.append(Segment(self._layout.span(position), sent.offsets, sent.values))
        if not found:
            return []
        if len({segment.values.device for segment in found}) > 1:  # a model spread over devices meets on the host
            found = [segment.cpu() for segment in found]
        if any(segment.offsets is not None for segment in found):
            merged = merge(span, found)
            return [] if merged is None else [merged]
        runs: list[list[Segment]] = [[found[0]]]
        for segment in found[1:]:
            if runs[-1][-1].span.end == segment.span.start:
                runs[-1].append(segment)
            else:
                runs.append([segment])
        return [
            Segment(Span(run[0].span.start, run[-1].span.end), None, torch.cat([part.values for part in run]))
            for run in runs
        ]


def merge_groups(offsets: Sequence[int], group_elements: int) -> list[range]:
    """Merge neighbouring tensors, last first as their gradients come, into groups of about ``group_elements``."""
    groups: list[range] = []
    end = len(offsets) - 1
    for position in reversed(range(len(offsets) - 1)):
        if offsets[end] - offsets[position] >= group_elements or position == 0:
            groups.append(range(position, end))
            end = position
    return groups
