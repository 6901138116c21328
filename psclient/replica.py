"""The replica: the model's parameters as places in the flat layout.

Between replies the replica never changes: a worker does not apply its own update, which comes back from the server.
Writing uses the parameters in place, so the user's references to them stay valid.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from pscore.layout import ModelLayout, Span
from pscore.segment import Segment


class Replica:
    """Reads and writes a model's parameters through flat indices.

    Args:
        layout: where each parameter lies.
        parameters: the tensors, in layout order, on any devices.
    """

    def __init__(self, layout: ModelLayout, parameters: Sequence[torch.Tensor]) -> None:
        """Keep references to the parameters."""
        self.layout = layout
        self.parameters = tuple(parameters)
        self._fp32: dict[int, torch.Tensor] = {}
        """fp32 copies of half-precision parameters, by position; only in top-k mode."""

    def read(self, span: Span) -> Iterator[Segment]:
        """Yield the values inside a span, tensor by tensor, dense, fp32 on the host."""
        for position, common in self.layout.overlapping(span):
            offset = self.layout.offsets[position]
            flat = self.parameters[position].detach().reshape(-1)
            yield Segment(common, None, flat[common.start - offset : common.end - offset].float().cpu())

    def write(self, segments: Sequence[Segment]) -> None:
        """Write an exact reply's values over the parameters'."""
        for position, part in self._parts(segments):
            with _flat(self.parameters[position]) as flat:
                values = part.values.to(flat.device, flat.dtype)
                if part.offsets is None:
                    flat[self._within(position, part.span)] = values
                else:
                    flat[self._offsets(position, part)] = values

    def add(self, segments: Sequence[Segment]) -> None:
        """Add a top-k reply's differences, in fp32; half-precision parameters follow their fp32 copies."""
        for position, part in self._parts(segments):
            with _flat(self.parameters[position]) as flat:
                master = self._fp32[position] if flat.dtype != torch.float32 else flat
                values = part.values.to(flat.device)
                if part.offsets is None:
                    where = self._within(position, part.span)
                    master[where] += values
                    if master is not flat:
                        flat[where] = master[where].to(flat.dtype)
                    continue
                offsets = self._offsets(position, part)
                master.index_add_(0, offsets, values)
                if master is not flat:
                    flat[offsets] = master[offsets].to(flat.dtype)

    def open_fp32(self, span: Span) -> None:
        """Begin to keep fp32 copies of the half-precision parameters inside a span, equal to what they hold now."""
        for position, common in self.layout.overlapping(span):
            parameter = self.parameters[position]
            if parameter.dtype == torch.float32:
                continue
            flat = parameter.detach().reshape(-1)
            copy = self._fp32.setdefault(position, flat.float())
            where = self._within(position, common)
            copy[where] = flat[where].float()

    def _parts(self, segments: Sequence[Segment]) -> Iterator[tuple[int, Segment]]:
        for segment in segments:
            for position, common in self.layout.overlapping(segment.span):
                part = segment.clip(common)
                if part is not None:
                    yield position, part

    def _within(self, position: int, span: Span) -> slice:
        offset = self.layout.offsets[position]
        return slice(span.start - offset, span.end - offset)

    def _offsets(self, position: int, part: Segment) -> torch.Tensor:
        assert part.offsets is not None
        shifted = part.offsets + (part.span.start - self.layout.offsets[position])
        return shifted.to(self.parameters[position].device)


@contextmanager
def _flat(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """Give a one-dimensional view in logical order; a copy that is written back where strides do not allow a view."""
    data = parameter.detach()
    if data.is_contiguous():
        yield data.view(-1)
        return
    copy = data.reshape(-1)
    yield copy
    data.copy_(copy.view(data.shape))
