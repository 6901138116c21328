"""What probes share: arguments, figures, clocks."""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def run(measure: Callable[..., dict[str, float]]) -> None:
    """Call ``measure`` with the JSON object that is this process's argument; print what it returns."""
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    print(json.dumps(measure(**arguments)), flush=True)


class Copy:
    """The anchor: a copy of a model on one thread, into memory that has been touched.

    A clone into new memory, whose pages the kernel must find and clear, costs up to three times as much.

    Args:
        elements: of the model, fp32.
    """

    def __init__(self, elements: int) -> None:
        self._source, self._target = torch.ones(elements), torch.ones(elements)

    def seconds(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Return what a copy takes by this clock."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        started = clock()
        self._target.copy_(self._source)
        seconds = clock() - started
        torch.set_num_threads(threads)
        return seconds


def thread_seconds() -> dict[str, float]:
    """Return the CPU time of each thread of this process, by its id."""
    files = {path.name: path / "schedstat" for path in Path("/proc/self/task").iterdir()}
    return {thread: int(file.read_text().split()[0]) / 1e9 for thread, file in files.items() if file.exists()}


def median(values: list[float]) -> float:
    """Return the median."""
    return statistics.median(values)
