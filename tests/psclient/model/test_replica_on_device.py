"""Replies written to parameters by the kernels of a device: in Triton's interpreter, or on a GPU where one is."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from psclient.model import replica as replica_module
from psclient.model.replica import Replica
from pscore.model.layout import Span, layout_of
from pscore.model.sparse_slice import SparseSlice
from pscore.selection.cuda import launches as cuda
from pscore.selection.cuda.launches import DeviceKernels
from tests.pscore.kernel_makers import DEVICE, randn
from tests.tiers import long_but

SHAPES = [(3,), (40, 50), (7, 3), (1,), (3000,)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float32, torch.float32]


def made(kernels, device, transposed=False):
    tensors = [randn(torch.Size(shape).numel(), seed).reshape(shape) for seed, shape in enumerate(SHAPES)]
    if transposed:
        tensors[2] = tensors[2].t().contiguous().t()
    parameters = [nn.Parameter(each.to(device, dtype)) for each, dtype in zip(tensors, DTYPES, strict=True)]
    layout = layout_of((f"p{i}", p) for i, p in enumerate(parameters))
    return Replica(layout, parameters, on_device=lambda _: kernels)


def sparse(span, seed):
    offsets = (randn(span.length, seed) > 0.8).nonzero().view(-1)
    return SparseSlice(span, offsets, randn(offsets.numel(), seed + 1))


def dense(low, high):
    return SparseSlice(Span(low, high), None, randn(high - low, low))


REPLIES = {
    "sparse": lambda size: [sparse(Span(0, size), 1)],
    "of shards": lambda size: [sparse(Span(0, 900), 1), sparse(Span(900, 2010), 3), sparse(Span(2010, size), 5)],
    "dense": lambda size: [dense(0, size)],
    "dense parts": lambda size: [dense(1, 700), dense(900, size)],
    "mixed": lambda size: [dense(0, 900), sparse(Span(900, size), 3)],
    "nothing": lambda size: [SparseSlice(Span(0, size), torch.empty(0, dtype=torch.int64), torch.empty(0))],
}


@pytest.mark.parametrize("with_kernels", [True, False])
@pytest.mark.parametrize("adds", long_but([True], [False, True]))
@pytest.mark.parametrize("reply", REPLIES)
def test_a_large_reply_goes_to_the_device_in_parts_with_the_same_bits(reply, adds, with_kernels, monkeypatch):
    """Of at most so many bytes: nobody needs memory for a whole reply there, as for a whole model at a join."""
    monkeypatch.setattr(cuda, "SCATTERED_BYTES", 1200)
    monkeypatch.setattr(replica_module, "SCATTERED_BYTES", 1200)
    copies, to_device = [], cuda.to_device
    monkeypatch.setattr(cuda, "to_device", lambda arrays, device: copies.append(arrays) or to_device(arrays, device))
    one = made(DeviceKernels(DEVICE) if with_kernels else None, DEVICE, transposed=True)
    segments = REPLIES[reply](one.layout.size)
    other = made(None, torch.device("cpu"), transposed=True)
    monkeypatch.setattr(Replica, "_write_plain", lambda own, segment, adds: own.layout.positions(segment.span))
    for each in (one, other):
        if adds:
            each.open_fp32(Span(0, each.layout.size))
        monkeypatch.setattr(replica_module, "SCATTERED_BYTES", 1200 if each is one else 1 << 30)
        (each.add if adds else each.write)(segments)
    for ours, theirs in zip(one.parameters, other.parameters, strict=True):
        assert torch.equal(ours.cpu(), theirs)
    assert all(sum(each.nbytes for each in entries) <= 1200 for _targets, _table, *entries in copies)
    if with_kernels and reply == "dense":
        assert len(copies) == -(-4 * (one.layout.size - 21) // 1200), "the transposed tensor goes by itself"


@pytest.mark.parametrize("transposed", long_but([True], [False, True]))
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("reply", REPLIES)
def test_a_reply_is_written_by_one_launch_with_the_bits_of_the_host(reply, adds, transposed, monkeypatch):
    kernels, launches = DeviceKernels(DEVICE), []
    scatter = kernels.scatter
    monkeypatch.setattr(kernels, "scatter", lambda *a, **kw: launches.append(1) or scatter(*a, **kw))
    one, other = made(kernels, DEVICE, transposed), made(None, torch.device("cpu"), transposed)
    segments = REPLIES[reply](one.layout.size)
    for replica in (one, other):
        if adds:
            replica.open_fp32(Span(0, replica.layout.size))
        for _ in range(2):
            (replica.add if adds else replica.write)(segments)
        assert replica.loaded() is None, "its own writes are known"
    for here, there in zip(one.parameters, other.parameters, strict=True):
        assert torch.equal(here.detach().cpu(), there.detach())
    for position, copy in other._fp32.items():
        assert torch.equal(one._fp32[position].cpu(), copy)
    assert len(launches) == 2 * {"nothing": 0, "mixed": 2}.get(reply, 1)
    with torch.no_grad():
        one.parameters[1][0, 0] = 5
    assert one.loaded() == "p1"


def test_a_parameter_with_other_memory_is_found():
    replica = made(DeviceKernels(DEVICE), DEVICE)
    replica.parameters[4].data = replica.parameters[4].data.clone()
    assert replica.loaded() is None
    replica.write([SparseSlice(Span(0, replica.layout.size), torch.tensor([replica.layout.size - 1]), torch.ones(1))])
    assert float(replica.parameters[4].detach()[-1]) == 1.0
