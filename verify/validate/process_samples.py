"""What a process uses, sampled from /proc, and whether it stays flat."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

LEAST_POINTS = 6
"""Points of a curve after its warm-up, to judge it by."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look.

    Attributes:
        seconds: since the beginning.
        memory_bytes: resident.
        threads: of the process.
        descriptors: open files and sockets.
        disk_bytes: of the data directory.
    """

    seconds: float
    memory_bytes: int
    threads: int
    descriptors: int
    disk_bytes: int


def look(pid: int, data_dir: Path, seconds: float) -> Sample:
    """Sample a process and its data directory."""
    process = Path(f"/proc/{pid}")
    resident = int((process / "statm").read_text().split()[1]) * _PAGE_BYTES
    status = (process / "status").read_text()
    threads = int(next(line for line in status.splitlines() if line.startswith("Threads:")).split()[1])
    return Sample(seconds, resident, threads, len(os.listdir(process / "fd")), _size(data_dir))


def _size(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:  # a snapshot was removed between the two
                continue
    return total


@dataclass(frozen=True, slots=True)
class Trend:
    """Where a figure goes after the warm-up.

    Attributes:
        name: of the figure.
        unit: of its values.
        level: median of the first third.
        change: median of the last third, less that.
        slope: a minute, by least squares.
        allowed: change up to which the figure counts as flat.
    """

    name: str
    unit: str
    level: float
    change: float
    slope: float
    allowed: float

    @property
    def flat(self) -> bool:
        """Whether it does not grow; falling is no fault."""
        return self.change <= self.allowed


def trend(
    name: str, unit: str, points: list[tuple[float, float]], *, share: float, least: float, warm_up: float
) -> Trend:
    """Judge a curve of (seconds, value) after its warm-up.

    Args:
        name: of the figure.
        unit: of its values.
        points: in order.
        share: growth that is allowed, as a share of the level.
        least: growth that is allowed in any case.
        warm_up: seconds that do not count.

    Raises:
        ValueError: fewer than :data:`LEAST_POINTS` are left.
    """
    seconds, values = np.array([point for point in points if point[0] >= warm_up]).reshape(-1, 2).T
    if len(values) < LEAST_POINTS:
        raise ValueError(f"{name}: {len(values)} points after {warm_up:.0f} s are too few to judge")
    third = len(values) // 3
    level = float(np.median(values[:third]))
    change = float(np.median(values[-third:])) - level
    slope = float(np.polyfit(seconds / 60, values, 1)[0])
    return Trend(name, unit, level, change, slope, max(least, share * level))
