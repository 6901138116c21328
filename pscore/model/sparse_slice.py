"""The one representation of an update inside the system: entries of a span of the flat layout."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from pscore.model.layout import ModelLayout, Span


@dataclass(frozen=True, slots=True)
class SparseSlice:
    """Some or all elements of a span of the flat layout, with a value each.

    Attributes:
        offsets: int64 ``[k]``, strictly increasing, counted from ``span.start``; ``None`` means every element.
        values: ``[k]``, floating point, or words of a feed; on the same device as ``offsets``.
    """

    span: Span
    offsets: torch.Tensor | None
    values: torch.Tensor

    @property
    def entries(self) -> int:
        """Number of values (``k``)."""
        return self.values.numel()

    def cpu(self) -> "SparseSlice":
        """Return the same entries on the host; those of a CUDA device come by pinned memory, and with one wait."""
        values = self.values.to("cpu", non_blocking=True)
        offsets = None if self.offsets is None else self.offsets.to("cpu", non_blocking=True)
        if self.values.is_cuda:
            torch.cuda.current_stream(self.values.device).synchronize()
        return SparseSlice(self.span, offsets, values)

    def everywhere(self) -> "SparseSlice":
        """Return the entries and zeros between them, without offsets."""
        if self.offsets is None:
            return self
        values = self.values.new_zeros(self.span.length)
        values[self.offsets] = self.values
        return SparseSlice(self.span, None, values)

    def clip(self, span: Span) -> "SparseSlice | None":
        """Return the part inside ``span`` as views of the same memory; ``None`` if nothing lies there."""
        common = self.span.intersect(span)
        if not common.length:
            return None
        if common == self.span:
            return self
        low, high = common.start - self.span.start, common.end - self.span.start
        if self.offsets is None:
            return SparseSlice(common, None, self.values[low:high])
        bounds = torch.searchsorted(
            self.offsets, torch.tensor([low, high], dtype=torch.int64, device=self.offsets.device)
        )
        first, last = (int(bound) for bound in bounds)
        if first == last:
            return None
        return SparseSlice(common, self.offsets[first:last] - low, self.values[first:last])


def by_tensor(layout: ModelLayout, segment: SparseSlice) -> Iterator[tuple[int, SparseSlice]]:
    """Yield the position of each parameter in which entries lie, and these, as views of the same memory.

    Parameters without entries cost next to nothing.
    """
    span, touched = segment.span, layout.positions(segment.span)
    cuts = np.array(layout.offsets[touched.start : touched.stop + 1]).clip(span.start, span.end) - span.start
    offsets = segment.offsets
    if offsets is None:
        bounds = cuts
    elif offsets.is_cpu:
        bounds = np.searchsorted(offsets.numpy(), cuts)
    else:
        bounds = torch.searchsorted(offsets, torch.from_numpy(cuts).to(offsets.device)).cpu().numpy()
    for number in np.flatnonzero(np.diff(bounds)).tolist():
        low, high, first, last = map(int, (cuts[number], cuts[number + 1], bounds[number], bounds[number + 1]))
        part = None if offsets is None else offsets[first:last] - low
        inside = Span(span.start + low, span.start + high)
        yield touched.start + number, SparseSlice(inside, part, segment.values[first:last])


def entries(segments: Iterable[SparseSlice]) -> int:
    """Count the entries of several segments."""
    return sum(segment.entries for segment in segments)


def merge(span: Span, segments: Iterable[SparseSlice]) -> SparseSlice | None:
    """Join segments, which must be ascending and inside ``span``, into one; ``None`` without an entry.

    All-dense neighbours that fill the span stay dense; otherwise dense ones are written out as offsets. A single
    segment that begins where ``span`` does shares its memory with the result.
    """
    parts = [segment for segment in segments if segment.entries]
    if not parts:
        return None
    if len(parts) == 1 and parts[0].offsets is not None and parts[0].span.start == span.start:
        return SparseSlice(span, parts[0].offsets, parts[0].values)
    values = _concatenated([part.values for part in parts])
    if all(part.offsets is None for part in parts) and values.numel() == span.length:
        return SparseSlice(span, None, values)
    return SparseSlice(span, _offsets_within(parts, span), values)


def _concatenated(tensors: list[torch.Tensor]) -> torch.Tensor:
    if len(tensors) == 1:
        return tensors[0]
    if tensors[0].device.type == "cpu" and tensors[0].dtype != torch.bfloat16:
        # numpy stays on this thread; torch would start a pool of threads for each thread that calls it.
        return torch.from_numpy(np.concatenate([tensor.numpy() for tensor in tensors]))
    return torch.cat(tensors)


def _offsets_within(parts: list[SparseSlice], span: Span) -> torch.Tensor:
    """Return the offsets of all parts, counted from the start of ``span``."""
    device = parts[0].values.device
    joined = torch.empty(entries(parts), dtype=torch.int64, device=device)
    first = 0
    for part in parts:
        place = joined[first : first + part.entries]
        shift = part.span.start - span.start
        if device.type == "cpu":  # in numpy, which stays on this thread
            array = place.numpy()
            if part.offsets is None:
                array[:] = np.arange(shift, shift + part.entries)
            else:
                np.add(part.offsets.numpy(), shift, out=array)
        elif part.offsets is None:
            torch.arange(shift, shift + part.entries, dtype=place.dtype, device=place.device, out=place)
        else:
            torch.add(part.offsets, shift, out=place)
        first += part.entries
    return joined
