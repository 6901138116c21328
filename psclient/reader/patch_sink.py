"""A receiver of patches: an engine that takes changes of tensors by name, and cannot undo them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from psclient.reader.cut import Cut
from psclient.reader.sink import Sink, StagedCut, reader_dtype
from pscore.model.layout import ModelLayout, TensorSpec
from pscore.model.sparse_slice import SparseSlice


@dataclass(frozen=True, slots=True)
class Patch:
    """New values of a tensor, as vLLM's ``CheckpointWeightPatch`` has them.

    Attributes:
        name: of the tensor in the run.
        shape, dtype: of the whole tensor.
        values: ``[k]`` in that dtype, on the host; all of them in the tensor's shape if there are no indices.
        indices: int64 ``[k]``, strictly ascending, in the flat tensor; ``None``: every element.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor
    indices: torch.Tensor | None


class PatchReceiver(Protocol):
    """What takes patches. It is called from the follower's thread."""

    def stage(self, patches: Sequence[Patch]) -> None:
        """Get everything ready that can fail, without a change that anybody sees."""

    def commit(self, cut: Cut) -> None:
        """Apply what is staged. If this raises, the model counts as poisoned until all of it has been sent again."""

    def abort(self) -> None:
        """Drop what is staged."""


class PatchSink(Sink):
    """Hands patches to a receiver. What it holds cannot be read, so the digests of differences cannot be checked.

    Their transfer is checked by its checksum, and whole models by their digest. ``dtype`` is that of :class:`Sink`.
    """

    def __init__(self, receiver: PatchReceiver, dtype: torch.dtype | None = None) -> None:
        self._receiver, self._dtype = receiver, reader_dtype(dtype)
        self._held: Cut | None = None
        self._cut: Cut | None = None
        self._fingerprint = b""

    def dtype(self, layout: ModelLayout | None) -> torch.dtype | None:
        """Return what was asked for."""
        return self._dtype

    def open(self, layout: ModelLayout) -> Cut | None:
        """Return the cut that the receiver holds; ``None`` if a commit has failed."""
        if layout.fingerprint != self._fingerprint:
            self._fingerprint, self._held = layout.fingerprint, None
        return self._held

    def is_current(self) -> bool:
        """Return true: a receiver keeps its model."""
        return True

    def read(self, entries: SparseSlice) -> None:
        """Return nothing: what a receiver holds cannot be read."""

    def buffers(self) -> bytes:
        """Return nothing, so that they come with each version."""
        return b""

    def stage(self, staged: StagedCut) -> None:
        """Stage the patches of all tensors that change, buffers among them."""
        self._cut = staged.cut
        buffers = zip(staged.layout.buffers, staged.buffers or (), strict=False)
        whole = [Patch(spec.name, spec.shape, spec.dtype, value, None) for spec, value in buffers]
        self._receiver.stage([*patches_of(staged.layout, staged.changes), *whole])

    def commit(self) -> None:
        """Have them applied."""
        cut, self._cut, self._held = self._cut, None, None  # a mixture, until it is done
        assert cut is not None
        self._receiver.commit(cut)
        self._held = cut

    def abort(self) -> None:
        """Have them dropped."""
        self._cut = None
        self._receiver.abort()

    def close(self) -> None:
        """Do nothing: the receiver keeps its model."""


def patches_of(layout: ModelLayout, changes: Sequence[SparseSlice]) -> Iterator[Patch]:
    """Yield the patches of entries in ascending order, one a tensor; a tensor of which all is there has no indices."""
    found: dict[int, list[SparseSlice]] = {}
    for change in changes:
        for position, common in layout.overlapping(change.span):
            if (part := change.clip(common)) is not None:
                found.setdefault(position, []).append(part)
    for position, parts in found.items():
        yield _patch(layout.parameters[position], layout.offsets[position], parts)


def _patch(spec: TensorSpec, start: int, parts: Sequence[SparseSlice]) -> Patch:
    values = torch.cat([part.values for part in parts]).to(spec.dtype)
    if values.numel() == spec.numel:
        return Patch(spec.name, spec.shape, spec.dtype, values.view(spec.shape), None)
    indices = [
        torch.arange(part.span.length, dtype=torch.int64, device="cpu") if part.offsets is None else part.offsets
        for part in parts
    ]
    flat = torch.cat([each + (part.span.start - start) for each, part in zip(indices, parts, strict=True)])
    return Patch(spec.name, spec.shape, spec.dtype, values, flat)
