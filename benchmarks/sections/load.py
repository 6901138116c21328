"""Section *load*: how many pushes a second one server takes, by number of workers, size of the model and density."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks.harness import plots
from benchmarks.harness.generators import Generators, Window
from benchmarks.harness.load_generator import write_frames
from benchmarks.harness.section import Plan, Plot, Section, Table
from benchmarks.workload.layouts import noise_push, one_tensor
from benchmarks.workload.raw_worker import RawWorker, join_request, push_messages
from psclient.rpc.local_server import LocalServer
from pscore.model.layout import ModelLayout
from pscore.wire.frames import DEFAULT_CHUNK_BYTES, FRAMING_BYTES

KEY, TITLE = "load", "Pushes a second that one server takes"

_DENSITY = 0.01
_DENSITIES = (0.1, 0.01, 0.001)
_SHARED_WORKERS = 8
"""Workers where density varies."""


class Point(NamedTuple):
    size: int
    density: float
    workers: int


class Load(NamedTuple):
    """What was found at a point."""

    push_bytes: int
    window: Window

    @property
    def rate(self) -> float:
        """Pushes a second."""
        return self.window.pushes / self.window.seconds

    @property
    def bytes_rate(self) -> float:
        """Message bytes a second."""
        return self.rate * self.push_bytes

    @property
    def server_seconds(self) -> float:
        """CPU time of the server for a push."""
        return self.window.server_cpu / max(self.window.pushes, 1e-9)


def run(plan: Plan) -> Section:
    """Load one server a size, point after point."""
    sizes = (1_000_000, 10_000_000) if plan.quick else (100_000, 1_000_000, 10_000_000, 100_000_000)
    workers = (1, _SHARED_WORKERS) if plan.quick else (1, 2, 4, _SHARED_WORKERS, 16, 32)
    seconds = 0.5 if plan.quick else 2.5
    found: dict[Point, Load] = {}
    left_out = 0
    for size in sizes:
        points = [Point(size, _DENSITY, count) for count in workers]
        points += [Point(size, density, _SHARED_WORKERS) for density in _DENSITIES if density != _DENSITY]
        for point, load in _one_server(plan, size, points, seconds):
            if load is None:
                left_out += 1
            else:
                found[point] = load
    return _section(found, sizes, left_out)


def _one_server(plan: Plan, size: int, points: Sequence[Point], seconds: float) -> Iterator[tuple[Point, Load | None]]:
    """Measure all points of one size; ``None`` where the time is over."""
    if not plan.has_time(6 * seconds):
        yield from ((point, None) for point in points)
        return
    layout = one_tensor(size)
    plan.say(f"{size:,} parameters: upload")
    with (
        LocalServer(down_mode="exact", buffers="none", lease_seconds=600) as server,
        tempfile.TemporaryDirectory() as d,
    ):
        with RawWorker(server.addresses[0], layout, "uploader"):
            pass
        process, files, warm = psutil.Process(server.processes[0].pid), {}, False
        for point in points:
            if not plan.has_time(3 * seconds):
                yield point, None
                continue
            plan.say(f"{size:,} parameters, {point.density:.1%}, {point.workers} workers")
            if point.density not in files:
                files[point.density] = write_push(Path(d), layout, point.density, plan.seed)
            path, push_bytes = files[point.density]
            names = [f"worker-{number}" for number in range(point.workers)]
            if not warm:  # the first pushes find nothing compiled and no memory touched
                with _generators(server, path, names) as first:
                    first.measure(process, seconds)
                warm = True
            with _generators(server, path, names) as generators:
                yield point, Load(push_bytes, generators.measure(process, seconds))


def _generators(server: LocalServer, path: Path, names: Sequence[str]) -> Generators:
    """Start generators; they end with their first measurement."""
    return Generators(server.addresses[0], [path], names, os.cpu_count() or 1)


def write_push(directory: Path, layout: ModelLayout, density: float, seed: int) -> tuple[Path, int]:
    """Encode a push once for all; return its file and its bytes on the wire."""
    push = noise_push(layout, density, 0, np.random.default_rng(seed))
    frames = push_messages(layout, push, DEFAULT_CHUNK_BYTES)
    path = directory / f"{density}.{seed}.frames"
    write_frames(path, [join_request(layout).SerializeToString(), *frames])
    return path, sum(len(frame) + FRAMING_BYTES for frame in frames)


def _section(found: dict[Point, Load], sizes: Sequence[int], left_out: int) -> Section:
    section = Section(KEY, TITLE)
    heads = ("parameters, density", "workers", "push, MB", "pushes/s", "MB/s", "server CPU, ms a push", "generators")
    rows = [
        (
            f"{point.size:,}, {point.density:.1%}",
            str(point.workers),
            f"{load.push_bytes / 1e6:.3g}",
            f"{load.rate:.3g}",
            f"{load.bytes_rate / 1e6:.3g}",
            f"{load.server_seconds * 1e3:.3g}",
            f"{load.window.generator_cpu / max(load.window.server_cpu, 1e-9):.0%}",
        )
        for point, load in sorted(found.items())
    ]
    section.tables.append(Table("One server process on loopback, exact replies, no pulls", heads, rows))
    section.figures = {
        f"{point.size} parameters, density {point.density}, {point.workers} workers": {
            "push_bytes": load.push_bytes,
            "pushes_a_second": load.rate,
            "bytes_a_second": load.bytes_rate,
            "server_cpu_seconds_a_push": load.server_seconds,
            **load.window._asdict(),
        }
        for point, load in sorted(found.items())
    }
    section.plots = _plots(found, sizes)
    section.notes += [
        "Generators replay one encoded push, with a header of its own each time, and wait for each answer before the "
        "next. They share the machine's cores with the server; the last column is their CPU time over the server's.",
        "A push is decoded, validated, checked, applied and put into the ledger as in training. Its entries are the "
        "same ones each time, which is kind to caches; the section on pushes and pulls has the times of fresh ones.",
        "Pushes that the edge of the window cuts count in part.",
    ]
    if left_out:
        section.notes.append(f"{left_out} points were left out: the section's time was over.")
    return section


def _plots(found: dict[Point, Load], sizes: Sequence[int]) -> list[Plot]:
    by_workers = [
        plots.Line(
            f"{size / 1e6:g} M parameters",
            sorted((p.workers, load.rate) for p, load in found.items() if p.size == size and p.density == _DENSITY),
        )
        for size in sizes
    ]

    def by_size(what: str) -> list[plots.Line]:
        return [
            plots.Line(
                f"{density:.1%}",
                sorted(
                    (p.size, getattr(load, what) * (1e3 if what == "server_seconds" else 1e-6))
                    for p, load in found.items()
                    if p.density == density and p.workers == _SHARED_WORKERS
                ),
            )
            for density in _DENSITIES
        ]

    crowd = f"{_SHARED_WORKERS} workers; one line a density."
    return [
        plots.lines(
            "Pushes a second by workers",
            f"Density {_DENSITY:.0%}; one line a model size.",
            ("workers", "pushes a second"),
            by_workers,
            log_x=True,
            log_y=True,
        ),
        plots.lines(
            "Megabytes a second by model size",
            crowd,
            ("parameters", "MB a second, received"),
            by_size("bytes_rate"),
            log_x=True,
            log_y=True,
        ),
        plots.lines(
            "Server CPU time of a push by model size",
            crowd,
            ("parameters", "ms of CPU a push"),
            by_size("server_seconds"),
            log_x=True,
            log_y=True,
        ),
    ]
