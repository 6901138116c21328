"""Times of a device, as rows of a table for docs/evidence/measured.md.

Selection is timed by events behind a synchronisation, until the entries are on the host. Everything else is wall time
between two synchronisations: what a user waits for.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks.harness.section import Section
from benchmarks.sections import cuda_selection
from benchmarks.workload.layouts import noise_push, one_tensor
from benchmarks.workload.shard_server import InProcessShard

_ROOT = Path(__file__).parents[2]
_ROUNDS, _WARMUP = 20, 5
_DENSITY = 0.01
_TOPK_AFTER = 4  # pushes
_SIZES = (1_000_000, 25_600_000)

Row = tuple[str, str, str]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table: what, measured, to reach."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--elements", type=int, default=25_600_000, help="of the server's model")
    parser.add_argument("--layout", default="resnet50", choices=("resnet50", "resnet18", "small"), help="that steps")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    rows: list[Row] = []
    if device.type == "cuda":
        for size in _SIZES:
            rows += _selection(size)
    rows += _step(options.layout, options.device)
    for place in dict.fromkeys((torch.device("cpu"), device)):
        rows += _server(options.elements, place)
    print("| what | measured | to reach |\n|---|---:|---:|")
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def _selection(size: int) -> list[Row]:
    """Return the rows of accumulating and selecting 1 % of one tensor."""
    section = Section("gpu", "gpu")
    cuda_selection.measure(section, size, _ROUNDS)
    figures = section.figures["cuda"]
    seconds, floor = figures["seconds"], figures["floor_seconds"]
    small = size < 10_000_000
    return [
        (f"copy of {size:,} fp32", f"{figures['copy_bytes_per_second'] / 1e9:,.0f} GB/s", ""),
        (
            f"accumulate and select 1 % of {size:,}, host to host",
            f"{1e6 * seconds['ours']:.0f} µs, {seconds['ours'] / floor:.2f} × the floor of 12 + 8ρ bytes an element",
            "≤ 60 µs" if small else "≤ 1.3 × the floor",
        ),
        ("the same by torch.topk, as long", f"{seconds['torch.topk'] / seconds['ours']:.1f} ×", "≥ 10 ×"),
    ]


def _step(layout: str, device: str) -> list[Row]:
    """Return the rows of ``step()`` of a worker that is alone with a server on the host."""
    arguments = {"layout": layout, "steps": _ROUNDS, "warmup": _WARMUP, "device": device}
    command = [sys.executable, str(_ROOT / "benchmarks" / "probes" / "steps.py"), json.dumps(arguments)]
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    rows = [(f"step(), {layout}, {device}: wall", f"{figures['wall_ms']:.2f} ms", "")]
    phases = {name.removesuffix("_ms"): value for name, value in figures.items() if name.startswith("of ")}
    return rows + [(name, f"{value:.2f} ms", "") for name, value in phases.items()]


def _server(elements: int, device: torch.device) -> list[Row]:
    """Return the rows of a push of 1 % and of a top-k reply, against ``index_add_`` and a copy on the same device."""
    layout, rng = one_tensor(elements), np.random.default_rng(0)
    shard = InProcessShard(layout, "topk", device=device.type)
    pushes = [noise_push(layout, _DENSITY, 0, rng) for _ in range(_TOPK_AFTER)]
    theta, target = torch.zeros(elements, device=device), torch.zeros(elements, device=device)
    where, values = pushes[0].offsets, pushes[0].values.to(device)
    assert where is not None
    where = where.to(device)
    shard.open_image()

    def push(turn: int) -> None:
        shard.commit(pushes[turn % len(pushes)])

    def reply(_: int) -> None:
        for _message in shard.pull_topk().messages:
            pass

    bare = _milliseconds(lambda _: theta.index_add_(0, where, values, alpha=-1), device)
    copied = _milliseconds(lambda _: target.copy_(theta), device)
    pushed = _milliseconds(push, device)
    replied = _milliseconds(reply, device, before_each=push)
    shard.close()
    name = f"{elements:,} elements, {device}"
    return [
        (f"push of 1 % applied, {name}", f"{pushed:.2f} ms, {pushed / bare:.1f} × index_add_", "≤ 3 ×"),
        (f"top-k reply with its bytes, {name}", f"{replied:.2f} ms, {replied / copied:.1f} copies", "≤ 2.5 copies"),
    ]


def _milliseconds(
    case: Callable[[int], object], device: torch.device, before_each: Callable[[int], object] | None = None
) -> float:
    """Return the median wall time of a case, between two synchronisations."""
    found = []
    for turn in range(_WARMUP + _ROUNDS):
        if before_each is not None:
            before_each(turn)
        _synchronize(device)
        started = time.perf_counter()
        case(turn)
        _synchronize(device)
        found.append(1e3 * (time.perf_counter() - started))
    return median(found[_WARMUP:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
