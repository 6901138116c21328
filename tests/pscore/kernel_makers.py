"""Tensors of one device with their twins on the host, for the tests of the device's kernels."""

import numpy as np
import torch

from pscore.selection.cuda.launches import DeviceKernels
from pscore.selection.cuda.segments import DeviceSegments
from pscore.selection.host import segments
from pscore.selection.host.segments import KINDS, HostSegments

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""A GPU where there is one; elsewhere the CPU, and Triton's interpreter (see tests/conftest.py)."""


def randn(n, seed=0):
    """Normal numbers that do not depend on the device."""
    return torch.randn(n, generator=torch.Generator().manual_seed(int(seed)))


def same_bits(a, b):
    return torch.equal(a.cpu().view(torch.int32), b.cpu().view(torch.int32))


class Twins:
    """Tensors end to end in one memory on the device, and the same on the host; ``shift`` elements from alignment."""

    def __init__(self, sizes, *, block=256, shift=0, memory=None):
        self.sizes = np.array(sizes)
        self.starts = np.cumsum(self.sizes) - self.sizes
        total = int(self.sizes.sum())
        memory = randn(total, 99) * 0.1 if memory is None else memory
        self.memory, self.momentum = (self.shifted(each, shift) for each in (memory, randn(total, 98)))
        self.host = {name: getattr(self, name).cpu().numpy().copy() for name in ("memory", "momentum")}
        self.segments = DeviceSegments(DeviceKernels(DEVICE, block=block, part=block), self.sizes, self.starts)
        self.rows = self.segments.rows
        self.rows["start"] = self.starts
        for name in ("memory", "momentum"):
            self.rows[name] = getattr(self, name).data_ptr() + 4 * self.starts
        self.own = np.zeros(len(sizes), segments.ROW)
        self.used = []

    @staticmethod
    def shifted(values, shift):
        room = torch.zeros(values.numel() + shift, dtype=values.dtype, device=DEVICE)
        room[shift:] = values
        return room[shift:]

    def give(self, name, values, shift=0):
        """Set the gradients or parameters of all rows: a tensor each."""
        singular = name.rstrip("s") if name == "parameters" else name
        self.used += (tensors := [self.shifted(each, shift) for each in values])
        self.used += (twins := [each.cpu().clone() for each in tensors])
        for rows, given in ((self.rows, tensors), (self.own, twins)):
            rows[name] = [each.data_ptr() for each in given]
            rows[f"{singular}_kind"] = [KINDS[each.dtype] for each in given]

    def want(self, k, *, searched=True):
        self.rows["searched"] = searched & (np.array(k) < self.sizes)
        self.segments.want(np.array(k))

    def align(self):
        addresses = [self.rows[name] for name in ("memory", "momentum", "gradient", "parameters")]
        self.rows["aligned"] = np.bitwise_or.reduce(addresses) % 16 == 0

    def parts(self, tensor):
        return list(tensor.split(self.sizes.tolist()))

    def select(self, states, clip=1.0):
        self.align()
        self.segments.launch(clip, states)
        momenta = {row: part for row, part in enumerate(self.parts(self.momentum)) if self.rows["masked"][row]}
        return self.segments.collect(self.parts(self.memory), momenta)

    def on_host(self, clip=1.0):
        """The same update by the host's loops, which take whatever is above the thresholds."""
        for name in segments.ROW.names:
            if name not in ("gradient", "parameters"):
                self.own[name] = self.rows[name]
        self.own["searched"] = False
        own = HostSegments(self.sizes)
        own.rows[:] = self.own
        own.want(self.sizes)
        offsets, values, counts, _ = own.select(clip, self.host["memory"], self.host["momentum"], {})
        return np.arange(values.size) if offsets is None else offsets, values, counts
