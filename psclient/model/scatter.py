"""Entries of the flat layout, written to the tensors of a device: all tensors together, in parts of bounded size."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pscore.model.layout import ModelLayout
from pscore.model.sparse_slice import SparseSlice
from pscore.selection.cuda.launches import DeviceKernels
from pscore.selection.rule import Integers


def scatter(
    kernels: DeviceKernels,
    layout: ModelLayout,
    targets: NDArray[Any],
    segments: Sequence[SparseSlice],
    *,
    adds: bool,
) -> Integers:
    """Write the values that segments on the host have for some tensors, or add them.

    Args:
        kernels: of the tensors' device.
        layout: of all tensors.
        targets: of :data:`~pscore.selection.cuda.launches.TARGET`, by position; address 0: no entries for this tensor.
        segments: of spans of the layout, without common entries.
        adds: add in fp32 to a target's ``master``.

    Returns:
        The positions of the tensors that have got entries.
    """
    edges = np.array(layout.offsets)
    touched = []
    for is_dense in (True, False):
        rows, counts, offsets, values, done = [], [], [], [], 0
        for segment in segments:
            if (segment.offsets is None) != is_dense:
                continue
            within = layout.positions(segment.span)
            base, start = segment.span.start, edges[within.start : within.stop]
            cuts = edges[within.start : within.stop + 1].clip(base, segment.span.end) - base
            if segment.offsets is not None:
                cuts = np.searchsorted(segment.offsets.numpy(), cuts)
            found = np.diff(cuts)
            chosen = (targets["address"][within.start : within.stop] != 0) & (found > 0)
            row = targets[within.start : within.stop][chosen]
            row["shift"] = base - start[chosen]
            mine = slice(None) if chosen.all() else np.repeat(chosen, found)
            if is_dense:  # entries are numbered through all segments
                first = np.cumsum(found[chosen]) - found[chosen]
                row["shift"] += cuts[:-1][chosen] - first - done
            else:
                assert segment.offsets is not None
                offsets.append(segment.offsets.numpy()[mine])
            values.append(segment.values.float().numpy()[mine])
            rows.append(row)
            counts.append(found[chosen])
            touched.append(within.start + np.flatnonzero(chosen))
            done += values[-1].size
        if done:
            where = None if is_dense else _end_to_end(offsets)
            kernels.scatter(np.concatenate(rows), np.concatenate(counts), where, _end_to_end(values), adds=adds)
    return np.concatenate(touched) if touched else np.zeros(0, np.int64)


def _end_to_end(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Join arrays; the only one is not copied."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
