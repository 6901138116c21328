"""The part of section *selection* that needs a CUDA device: the Triton kernels beside a copy and ``torch.topk``."""

from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from benchmarks.harness.section import Section, Table
from pscore.selection import SelectorState, entries_for
from pscore.selection.cuda import device_kernels
from pscore.selection.cuda.segments import DeviceSegments

DEVICE = torch.device("cuda")

_WARMUP = 8  # steps; Triton compiles in the first, and the threshold has found its level after some
_RATE, _KEEP, _DENSITY = 0.1, 0.7, 0.01
_FLOOR_BYTES = 12 + 8 * _DENSITY  # an element: gradient and memory read, memory written, entries written


def measure(section: Section, n: int, rounds: int) -> None:
    """Add a table: milliseconds of the device, and how many times the floor at the device's own copy bandwidth."""
    kernels = device_kernels(DEVICE)
    if kernels is None:
        section.notes.append("CUDA: Triton is not installed, so there is nothing to measure on the device.")
        return
    k = entries_for(n, _DENSITY)
    gradients = [torch.randn(n, device=DEVICE) for _ in range(4)]
    memory, sorting = torch.zeros(n, device=DEVICE), torch.zeros(n, device=DEVICE)
    source, target = torch.ones(n, device=DEVICE), torch.empty(n, device=DEVICE)
    selection = DeviceSegments(kernels, np.array([n]), np.zeros(1, np.int64))
    rows = selection.rows
    rows["memory"], rows["rate"], rows["keep"], rows["searched"] = memory.data_ptr(), _RATE, _KEEP, True
    rows["aligned"] = n % 4 == 0
    selection.want(np.array([k]))
    state: SelectorState = {}
    shares = []

    def take(turn: int) -> None:
        rows["gradient"] = gradients[turn % 4].data_ptr()
        selection.launch(1.0, {0: state})
        shares.append(selection.collect([memory], {}).offsets.size / k)

    def topk(turn: int) -> None:
        sorting.add_(gradients[turn % 4], alpha=_RATE)
        offsets = sorting.abs().topk(k, sorted=False).indices
        values = sorting[offsets]
        sorting[offsets] = values * _KEEP

    cases: dict[str, Callable[[int], object]] = {
        "copy": lambda _: target.copy_(source),
        "ours": take,
        "torch.topk": topk,
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(_WARMUP + rounds):
        for name, case in cases.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            case(turn)
            end.record()
            torch.cuda.synchronize()
            if turn >= _WARMUP:
                seconds[name].append(begin.elapsed_time(end) / 1e3)
    bandwidth = 8 * n / median(seconds["copy"])
    floor = _FLOOR_BYTES * n / bandwidth
    lines = [(name, f"{median(each) * 1e3:.3f}", f"{median(each) / floor:.2f}") for name, each in seconds.items()]
    heads = (f"{torch.cuda.get_device_name()}, copy at {bandwidth / 1e12:.2f} TB/s", "ms", "to the floor")
    section.tables.append(
        Table(f"CUDA: {n:,} elements, {_DENSITY:.0%}, until the payload is on the host", heads, lines)
    )
    section.figures["cuda"] = {
        "seconds": {name: median(each) for name, each in seconds.items()},
        "copy_bytes_per_second": bandwidth,
        "floor_seconds": floor,
        "entries": shares[_WARMUP:],
    }
