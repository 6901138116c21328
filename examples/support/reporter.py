"""What a run shows and leaves: a progress bar or lines, TensorBoard, and one JSON object a line in metrics.jsonl."""

import json
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from . import metrics
from .launch import Place

LINE_SECONDS = 15.0
POINT_SECONDS = 2.0


_SUMS = ("step", "bytes", "seconds")
"""Figures that go on where a resumed run was."""


class Reporter:
    """Reports a worker's training; only worker 0's shows anything, the others are its peers.

    Args:
        place: of this worker.
        optimizer: whose version, staleness and bytes are reported.
        total: versions, or steps, in the whole training.
    """

    def __init__(self, place: Place, optimizer: torch.optim.Optimizer, total: int) -> None:
        self._place, self._optimizer, self._total = place, optimizer, max(1, total)
        self._console = Console()
        self._stack = ExitStack()
        self._steps = self._samples = 0
        self._started = self._line = self._point = time.monotonic()
        self._before = dict.fromkeys(_SUMS, 0)
        self._bar: Progress | None = None
        self._writer: Any = None

    def __enter__(self) -> "Reporter":
        if not self._place.is_first:
            return self
        self._place.out.mkdir(parents=True, exist_ok=True)
        path = self._place.out / metrics.NAME
        before = metrics.read(self._place.out) if self._place.resume else []
        if before:
            self._before = {name: before[-1].get(name, 0) for name in _SUMS}
        cut = path.exists() and not path.read_bytes().endswith(b"\n")
        self._metrics = self._stack.enter_context(path.open("a"))
        if cut:  # by a kill: what follows is a line of its own
            self._metrics.write("\n")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._console.print("tensorboard is not installed; the run's curves are in metrics.jsonl only")
        else:
            self._writer = self._stack.enter_context(SummaryWriter(str(self._place.out / "tensorboard")))
        if self._console.is_terminal:
            columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
            self._bar = self._stack.enter_context(Progress(*columns, console=self._console))
            self._task = self._bar.add_task("starting", total=self._total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files; tell of a run in which there was nothing to do."""
        self._stack.close()
        if error is None and not self._steps:
            print(
                f"{self._place.worker or 'this worker'} had nothing to train: the epochs that were asked for are over "
                "at this server, or others have taken what was left. A new run needs a new server.",
                flush=True,
            )

    def step(self, epoch: int, loss: torch.Tensor, samples: int) -> None:
        """Count a step; the loss is read from its device only now and then."""
        self._steps += 1
        self._samples += samples
        now = time.monotonic()
        if not self._place.is_first or now - self._point < POINT_SECONDS:
            return
        self._point = now
        found = self._figures(epoch, loss.item(), now)
        self._write("train", found)
        words = (
            f"epoch {epoch + 1}, loss {found['loss']:.3f}, version {found['version']}, "
            f"staleness {found['staleness']}, {found['samples_per_second']:.0f} samples/s, "
            f"{found['bytes'] / 1e6:.1f} MB"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=found["version"], description=words)
        elif now - self._line > LINE_SECONDS:
            self._line = now
            self._console.print(f"{found['version']}/{self._total}: {words}", highlight=False, soft_wrap=True)

    def evaluation(self, epoch: int, **figures: float) -> None:
        """Report what a test of the server's model has given after an epoch."""
        if not self._place.is_first:
            return
        found = self._figures(epoch, None, time.monotonic()) | figures
        self._write("test", found)
        said = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        self._console.print(
            f"epoch {epoch + 1}: server's model: {said} at version {found['version']}, {found['bytes'] / 1e6:.1f} MB",
            highlight=False,
            soft_wrap=True,
        )

    def say(self, words: str) -> None:
        """Print a line, from worker 0."""
        if self._place.is_first:
            self._console.print(words, highlight=False, soft_wrap=True)

    def _figures(self, epoch: int, loss: float | None, now: float) -> dict[str, Any]:
        optimizer = self._optimizer
        totals, report = getattr(optimizer, "totals", None), getattr(optimizer, "report", None)
        rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
        return {
            "epoch": epoch + 1,
            "step": self._before["step"] + self._steps,
            "version": getattr(optimizer, "version", self._steps),
            "loss": loss,
            "learning_rate": rates[0] if rates else None,
            "staleness": report.staleness if report else 0,
            "live_workers": getattr(optimizer, "live_workers", 1),
            "bytes": self._before["bytes"]
            + (totals.push_bytes + totals.pull_bytes + totals.buffer_bytes if totals else 0),
            "samples_per_second": self._samples / max(1e-9, now - self._started),
            "seconds": self._before["seconds"] + now - self._started,
        }

    def _write(self, kind: str, figures: dict[str, Any]) -> None:
        self._metrics.write(json.dumps({"kind": kind, **figures}) + "\n")
        self._metrics.flush()
        if self._writer is not None:
            for name, value in figures.items():
                if value is not None and name != "version":
                    self._writer.add_scalar(f"{kind}/{name}", value, figures["version"])
