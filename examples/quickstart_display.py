"""What the quickstart shows: the run as it goes, the table at its end, and the plot."""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quickstart_worker import Progress
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

Curve = Sequence[tuple[int, float]]
"""(bytes moved by all workers so far, test accuracy of the server's model)."""

_LINE_SECONDS = 5.0
_SMOOTHING = 0.1


class Display:
    """The workers of one run: a table that is kept up to date or, where there is no terminal, a line now and then."""

    def __init__(self, title: str, workers: int, console: Console) -> None:
        self._title = title
        self._last: list[Progress | None] = [None] * workers
        self._loss = [0.0] * workers
        self._accuracy = [0.0] * workers
        self._server = "starting the server and the workers"
        self._console = console
        self._live: Live | None = None
        if sys.stdout.isatty():
            self._live = Live(get_renderable=self._table, console=console, refresh_per_second=8)
        self._next_line = 0.0

    def __enter__(self) -> "Display":
        if self._live is not None:
            self._live.start()
        else:
            self._line()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        elif any(self._last):
            self._line()

    def worker(self, index: int, progress: Progress) -> None:
        """Take a worker's news in; loss and accuracy are averaged over about its last ten batches."""
        share = 1.0 if self._last[index] is None else max(_SMOOTHING, 1 / progress.step)
        self._loss[index] += share * (progress.loss - self._loss[index])
        self._accuracy[index] += share * (progress.accuracy - self._accuracy[index])
        if not any(self._last):
            self._server = "training"
        self._last[index] = progress
        if self._live is None and time.monotonic() > self._next_line:
            self._line()

    def server(self, version: int, accuracy: float) -> None:
        """Take in how good the server's model is."""
        self._server = f"server's model at version {version}: test accuracy {accuracy:.2%}"

    def _table(self) -> Table:
        table = Table(title=self._title, caption=self._server, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in ("worker", "", "step", "loss", "accuracy", "version", "stale", "up", "down"):
            table.add_column(name, justify="left" if name in ("worker", "") else "right", no_wrap=True)
        bar = max(4, min(24, self._console.width - 76))  # the rest of the table is about so wide
        for index, progress in enumerate(self._last):
            name = f"worker-{index}"
            if progress is None:
                table.add_row(name, ProgressBar(width=bar, completed=0), *["–"] * 7)
                continue
            table.add_row(
                name,
                ProgressBar(total=progress.steps, completed=progress.step, width=bar),
                f"{progress.step}/{progress.steps}",
                f"{self._loss[index]:.3f}",
                f"{self._accuracy[index]:.1%}",
                f"{progress.version}",
                f"{progress.staleness}",
                decimal(progress.push_bytes),
                decimal(progress.pull_bytes),
            )
        return table

    def _line(self) -> None:
        self._next_line = time.monotonic() + _LINE_SECONDS
        known = [progress for progress in self._last if progress is not None]
        if not known:
            print(f"{self._title}: {self._server}", flush=True)
            return
        done = sum(progress.step for progress in known) / (len(self._last) * known[0].steps)
        moved = decimal(sum(progress.bytes for progress in known))
        print(f"{self._title}: {done:4.0%} of the steps, {moved} moved; {self._server}", flush=True)


def final_table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return what the methods reached, side by side."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("method", "test accuracy", "steps", "up", "down", "buffers", "all bytes", "seconds"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for method, result in results.items():
        table.add_row(
            method.upper(),
            f"{result['test_accuracy']:.2%}",
            f"{result['steps']}",
            *(decimal(result[name]) for name in ("push_bytes", "pull_bytes", "buffer_bytes", "bytes")),
            f"{result['seconds']:.1f}",
        )
    return table


def plot(curves: Mapping[str, Curve], path: Path) -> None:
    """Draw test accuracy against bytes moved."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for (method, curve), color in zip(curves.items(), ("tab:blue", "tab:orange"), strict=False):
        moved, accuracy = zip(*curve, strict=True)
        label = f"{method.upper()}: {accuracy[-1]:.1%} with {decimal(moved[-1])}"
        axes.plot(moved, accuracy, color=color, marker=".", linewidth=2, label=label)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: decimal(int(x), precision=0)))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("bytes moved by all workers, both ways")
    axes.set_ylabel("test accuracy of the server's model")
    axes.set_title("Handwritten digits: accuracy against bytes")
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="best")
    figure.savefig(path, dpi=150)
    plt.close(figure)
