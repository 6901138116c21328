"""The entries of a group of tensors, as the segments that a push sends."""

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

import numpy as np
import torch

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice, merge
from pscore.wire.dense import cut

_LONG_RUN = 1 << 14  # elements of a dense run that is sent apart from the sparse entries beside it

_PIECE_ELEMENTS = 1 << 20  # of a dense segment that are encoded at a time


def joined(span: Span, sent: Iterable[SparseSlice]) -> list[SparseSlice]:
    """Return a group's entries, ascending: as one sparse segment, or as dense runs.

    Dense runs beside sparse entries are written out as entries of these, but for long ones.
    """
    found = [segment for segment in sent if segment.entries]
    if len({segment.values.device for segment in found}) > 1:  # a model spread over devices meets on the host
        found = [segment.cpu() for segment in found]
    found.sort(key=lambda segment: segment.span.start)
    if any(before.span.end > after.span.start for before, after in pairwise(found)):
        return [_ascending(one) for one in _merged(span, found)]
    found = _dense_runs(found)
    if all(segment.offsets is None for segment in found):
        return found
    parts = [(is_long, list(part)) for is_long, part in groupby(found, _is_long_run)]
    if len(parts) == 1:
        return _merged(span, found)
    return [
        one
        for is_long, part in parts
        for one in (part if is_long else _merged(Span(part[0].span.start, part[-1].span.end), part))
    ]


def pieces(segment: SparseSlice) -> list[SparseSlice]:
    """Cut a dense segment into pieces, of which encoding takes bounded memory beside the values."""
    if segment.offsets is not None:
        return [segment]
    return [piece for part in cut(segment.span, _PIECE_ELEMENTS) if (piece := segment.clip(part)) is not None]


def _is_long_run(segment: SparseSlice) -> bool:
    return segment.offsets is None and segment.entries >= _LONG_RUN


def _merged(span: Span, segments: Iterable[SparseSlice]) -> list[SparseSlice]:
    one = merge(span, segments)
    return [] if one is None else [one]


def _dense_runs(segments: Sequence[SparseSlice]) -> list[SparseSlice]:
    """Join dense neighbours; the others stay as they are."""
    runs: list[list[SparseSlice]] = []
    for segment in segments:
        before = runs[-1][-1] if runs else None
        if before is not None and before.offsets is segment.offsets is None and before.span.end == segment.span.start:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return [
        one
        for run in runs
        for one in (run if len(run) == 1 else _merged(Span(run[0].span.start, run[-1].span.end), run))
    ]


def _ascending(segment: SparseSlice) -> SparseSlice:
    """Sort a segment's entries: those of some tensors may lie between those of others."""
    assert segment.offsets is not None
    if segment.offsets.is_cpu:
        order = torch.from_numpy(np.argsort(segment.offsets.numpy(), kind="stable"))  # few sorted parts: fast
    else:
        order = segment.offsets.argsort()
    return SparseSlice(segment.span, segment.offsets[order], segment.values[order])
