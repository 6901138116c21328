"""Compiling the loops before they are needed."""

import numpy as np
import torch

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.selection import SELECTORS
from pscore.selection.host.rounding import narrowed
from pscore.selection.host.segments import HostSegments, first_not_finite
from pscore.wire.codecs.names import INDEX_CODECS, VALUE_CODECS
from pscore.wire.frames import WireForm, decode, encode

_SIZE, _ENTRIES = 65_536, 2048  # enough entries for the compiled codecs


def warm_up() -> None:
    """Run every loop that both sides need once, so that no call waits for the compiler: seconds, once a machine."""
    theta = torch.zeros(_SIZE, dtype=torch.float32, device="cpu")
    offsets = torch.arange(0, _SIZE, _SIZE // _ENTRIES, dtype=torch.int64, device="cpu")
    segment = SparseSlice(Span(0, _SIZE), offsets, theta[offsets])
    forms = [WireForm(value, INDEX_CODECS["rice"]) for value in VALUE_CODECS.values()]
    for form in forms + [WireForm(index=index) for index in INDEX_CODECS.values()]:
        for chunk, _ in encode(segment, form, chunk_bytes=1 << 20):
            decode(chunk, segment.span)


def warm_up_selection() -> None:
    """Run every loop that selects from a model's gradients once."""
    gradient, memory, nothing = (np.ones(size, np.float32) for size in (_SIZE, 2 * _SIZE, 0))
    sizes, wanted = np.full((2, 2), [[_SIZE], [_ENTRIES]])
    segments = HostSegments(sizes)
    rows = segments.rows
    rows["gradient"], rows["start"], rows["searched"] = gradient.ctypes.data, (0, _SIZE), True
    segments.want(wanted)
    first_not_finite(rows["gradient"].copy(), rows["gradient_kind"].copy(), sizes)
    narrowed(memory, 0)
    for selector in SELECTORS.values():
        segments.select(1.0, memory, nothing, {0: {}, 1: {}}, selector)
