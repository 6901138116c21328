"""Compiling the loops before they are needed."""

import torch

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.selection.kernels import kernels_for
from pscore.wire.codecs.names import INDEX_CODECS, VALUE_CODECS
from pscore.wire.frames import WireForm, decode, encode

_SIZE, _ENTRIES = 65_536, 2048  # enough entries for the compiled codecs


def warm_up() -> None:
    """Run every loop that both sides need once, so that no call waits for the compiler: seconds, once a machine."""
    theta = torch.zeros(_SIZE, dtype=torch.float32, device="cpu")
    offsets = torch.arange(0, _SIZE, _SIZE // _ENTRIES, dtype=torch.int64, device="cpu")
    kernels = kernels_for(theta)
    kernels.subtract_at(theta, offsets, torch.ones_like(theta[offsets]))
    kernels.copy_above(theta, 0.5, 0)
    kernels.magnitude(theta)
    segment = SparseSlice(Span(0, _SIZE), offsets, theta[offsets])
    forms = [WireForm(value, INDEX_CODECS["rice"]) for value in VALUE_CODECS.values()]
    for form in forms + [WireForm(index=index) for index in INDEX_CODECS.values()]:
        for chunk, _ in encode(segment, form, chunk_bytes=1 << 20):
            decode(chunk, segment.span)
