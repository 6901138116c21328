"""Compiling the loops before they are needed."""

import numpy as np
import torch

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.selection.host import segments
from pscore.selection.kernels import kernels_for
from pscore.selection.warm import correct
from pscore.wire.codecs.names import INDEX_CODECS, VALUE_CODECS
from pscore.wire.frames import WireForm, decode, encode

_SIZE, _ENTRIES = 65_536, 2048  # enough entries for the compiled codecs


def warm_up() -> None:
    """Run every loop that both sides need once, so that no call waits for the compiler: seconds, once a machine."""
    theta = torch.zeros(_SIZE, dtype=torch.float32, device="cpu")
    offsets = torch.arange(0, _SIZE, _SIZE // _ENTRIES, dtype=torch.int64, device="cpu")
    kernels = kernels_for(theta)
    kernels.subtract_at(theta, offsets, torch.ones_like(theta[offsets]))
    segment = SparseSlice(Span(0, _SIZE), offsets, theta[offsets])
    forms = [WireForm(value, INDEX_CODECS["rice"]) for value in VALUE_CODECS.values()]
    for form in forms + [WireForm(index=index) for index in INDEX_CODECS.values()]:
        for chunk, _ in encode(segment, form, chunk_bytes=1 << 20):
            decode(chunk, segment.span)


def warm_up_selection() -> None:
    """Run every loop that selects from a model's gradients once."""
    gradient, memory, nothing = (np.ones(size, np.float32) for size in (_SIZE, 2 * _SIZE, 0))
    sizes, wanted = np.full((2, 2), [[_SIZE], [_ENTRIES]])
    rows = np.zeros(2, segments.ROW)
    rows["gradient"], rows["start"] = gradient.ctypes.data, (0, _SIZE)
    rows["searched"], rows["rate"] = True, 1
    pieces = segments.Pieces(sizes)
    pieces.make_room(3 * wanted)
    segments.first_not_finite(rows["gradient"].copy(), rows["gradient_kind"].copy(), sizes)
    passed = segments.update(rows, pieces, 1.0, memory, nothing, nothing, 0)
    offsets = np.arange(passed.values.size)
    correct(rows, sizes, wanted, 0, memory, np.full(2, np.inf), np.zeros(2), passed, offsets)
    theta = torch.from_numpy(memory)
    kernels_for(theta).copy_above(theta, 0.5, 0)
    kernels_for(theta).magnitude(theta)
