"""Cuts without a server: values of a layout, staged into a sink as a follower stages them."""

import torch

from psclient.reader.sink import StagedCut
from pscore.model.buffers import pack
from pscore.model.digest import ModelDigest
from pscore.model.layout import ModelLayout, Span, TensorSpec
from pscore.model.sparse_slice import SparseSlice
from pscore.reader.cut import Cut, ShardVersion
from pscore.reader.transfer import digest_of_buffers

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LAYOUT = ModelLayout(
    (
        TensorSpec("a.weight", (6, 5), F32),
        TensorSpec("a.bias", (6,), F32),
        TensorSpec("nothing", (0,), F32),
        TensorSpec("b.weight", (4, 6), BF16, ("b.tied",)),
        TensorSpec("c", (), F16),
    ),
    (TensorSpec("mean", (3,), F32), TensorSpec("count", (), torch.int64)),
)
SPAN = Span(0, LAYOUT.size)


def values_of(seed):
    """Values that all dtypes of the layout have exactly."""
    return torch.randint(-100, 100, (LAYOUT.size,), generator=torch.Generator().manual_seed(seed)).float()


def buffers_of(seed):
    return [torch.full((3,), float(seed)), torch.tensor(seed)]


def cut_of(version, values, buffers=0):
    """A cut of these values, and of the buffers of a seed; 0 for none."""
    digest = ModelDigest(LAYOUT)
    digest.add(SparseSlice(SPAN, None, values))
    known = digest_of_buffers(packed(buffers)) if buffers else b""
    return Cut("run", (ShardVersion(1, version, digest.value),), known)


def _seed(buffers, kept):
    return kept if buffers is None else int(buffers[1])


def staged_whole(version, values, buffers=None, held=None, kept=0):
    """A cut of which everything came; without buffers, those of ``kept`` stay."""
    half = SPAN.end // 2
    changes = [SparseSlice(Span(0, half), None, values[:half]), SparseSlice(Span(half, SPAN.end), None, values[half:])]
    before = (
        []
        if held is None
        else [SparseSlice(each.span, None, held[each.span.start : each.span.end]) for each in changes]
    )
    return StagedCut(cut_of(version, values, _seed(buffers, kept)), LAYOUT, changes, before, buffers, is_whole=True)


def staged_difference(sink, version, before, values, buffers=None, kept=0):
    """A cut of which the changes came; what they overwrite is read from the sink."""
    offsets = (before != values).nonzero().view(-1)
    changes = [SparseSlice(SPAN, offsets, values[offsets])] if offsets.numel() else []
    return StagedCut(
        cut_of(version, values, _seed(buffers, kept)),
        LAYOUT,
        changes,
        [sink.read(each) for each in changes],
        buffers,
        is_whole=False,
    )


def changed(values, seed, share=0.3):
    """Some other values, in other places from seed to seed."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(values.numel(), generator=generator) < share
    return torch.where(chosen, values + 1, values)


def packed(seed):
    return pack(buffers_of(seed))


def read_all(sink):
    return sink.read(SparseSlice(SPAN, None, torch.zeros(SPAN.length))).values
