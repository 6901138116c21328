"""Memories and feeds for the kernel tests, and the reference's answer to the same call."""

import math

import torch

from pscore.select.kernels import reference
from pscore.select.kernels.base import GradientUpdate, Taken
from pscore.select.kernels.cuda import DeviceSelection

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""A GPU where there is one; elsewhere the CPU, and Triton's interpreter (see tests/conftest.py)."""

FEEDS = ("plain", "decay", "momentum", "momentum and decay", "half", "bfloat", "none")


def selection(block=256):
    return DeviceSelection(DEVICE, block=block)


def randn(n, seed=0):
    """Normal numbers that do not depend on the device."""
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def feed_of(kind, n, seed, momentum):
    dtype = {"half": torch.float16, "bfloat": torch.bfloat16}.get(kind, torch.float32)
    gradient = randn(n, seed).to(dtype)
    if kind == "none":
        return None
    decay = 0.01 if "decay" in kind else 0.0
    parameters = randn(n, 1000 + seed).to(dtype) if decay else None
    if "momentum" in kind:
        return GradientUpdate(gradient, 0.3, parameters, decay, momentum, 0.9)
    return GradientUpdate(gradient, 0.1, parameters, decay)


def turn_of(state):
    """Where filling starts: multiples of the golden section."""
    return state["turn"] * (math.sqrt(5) - 1) / 2 % 1.0 if "turn" in state else 0.0


def capacity_of(n, k):
    return min(n, math.ceil(1.25 * k))


def same_bits(a, b):
    return torch.equal(a.cpu().view(torch.int32), b.cpu().view(torch.int32))


def sift(x, threshold, capacity, turn):
    """The entries with |x| > threshold, ascending; where they do not fit, from ``turn`` (a share) round the end."""
    offsets = (x.abs() > threshold).nonzero().view(-1)
    hits = offsets.numel()
    if hits > capacity:
        first = min(int(torch.tensor(turn, dtype=torch.float32) * float(hits)), hits - 1)  # as the kernels round
        offsets = offsets[((torch.arange(capacity, device=x.device) + first) % hits).sort().values]
    return Taken(offsets, x[offsets]), hits


def check_against_reference(select, memory, feed, twin_momentum, k, keep, state):
    """Take with the kernels and with the reference at the threshold that they used; return what was pending."""
    n = memory.numel()
    twin = memory.clone()
    twin_feed = feed and GradientUpdate(
        feed.gradient, feed.scale, feed.parameters, feed.decay, twin_momentum, feed.factor
    )
    pending = select.take(memory, feed, k, keep, state, feed and feed.momentum)
    taken = pending.collect()
    if twin_feed is not None:
        reference.accumulate(twin, twin_feed)
    expected, hits = sift(twin, pending.threshold, capacity_of(n, k), turn_of(state))
    twin[expected.offsets] = expected.values * keep
    if twin_momentum is not None:
        twin_momentum[expected.offsets] = 0
    assert taken.offsets.dtype == torch.int64
    assert taken.offsets.device.type == taken.values.device.type == "cpu"
    assert torch.equal(taken.offsets, expected.offsets.cpu())
    assert same_bits(taken.values, expected.values)
    assert same_bits(memory, twin)
    assert bool((taken.offsets.diff() > 0).all())
    assert (pending.count, pending.hits, pending.k) == (taken.offsets.numel(), hits, k)
    on_device = pending.on_device()
    assert on_device.offsets.device.type == DEVICE.type
    assert torch.equal(on_device.offsets.cpu(), taken.offsets)
    assert same_bits(on_device.values, taken.values)
    return pending
