"""Which elements an update has changed."""

from collections.abc import Callable

import torch

from pscore.model.sparse_slice import SparseSlice

ChangedIndices = torch.Tensor | None
"""Offsets within the shard (int32 or int64, strictly increasing), or ``None`` for every element."""

Overwrites = Callable[[torch.Tensor, torch.Tensor | None], None]
"""Called before elements of a tensor change: those at offsets (int64, ascending) of the flat tensor, or all."""


def changed_by(push: SparseSlice | None) -> ChangedIndices:
    """Return the indices that a push over a shard's whole span names."""
    if push is None:
        return torch.empty(0, dtype=torch.int32, device="cpu")
    return None if push.offsets is None else push.offsets.to(offset_dtype(push.span.length))


def offset_dtype(length: int) -> torch.dtype:
    """Return the dtype of offsets within a shard of so many elements."""
    return torch.int32 if length < 2**31 else torch.int64
