"""How far a model's transfer has come: a bar on a terminal or in a notebook, and a line in the log now and then."""

import logging
import time
from typing import Any

log = logging.getLogger("psclient")

_QUIET_SECONDS = 3.0  # a transfer that takes no longer is not shown
_LINE_SECONDS = 10.0  # between two lines


class ProgressLine:
    """Shows one transfer, until the end of the ``with`` block."""

    def __init__(self) -> None:
        self._began = self._last_line = time.monotonic()
        self._bar: Any = None  # rich's, which is loaded when there is something to show
        self._task: Any = None

    def show(self, what: str, share: float, seconds_left: float | None = None) -> None:
        """Show ``what`` ("w0 uploads the model") at a share of 0 to 1; the time left is estimated if not given."""
        now = time.monotonic()
        if now - self._began < _QUIET_SECONDS:
            return
        if seconds_left is None and share:
            seconds_left = (now - self._began) * (1 - share) / share
        if self._bar is None:
            self._open_bar(what)
            self._last_line = now - _LINE_SECONDS
        self._bar.update(self._task, completed=share)
        if now - self._last_line >= _LINE_SECONDS:
            self._last_line = now
            left = f", {seconds_left:.0f} s left" if seconds_left else ""
            log.info("%s: %.0f %%%s", what, 100 * share, left)

    def _open_bar(self, what: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = ("{task.description}", BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeRemainingColumn())
        is_seen = console.is_terminal or console.is_jupyter
        self._bar = Progress(*columns, console=console, transient=True, disable=not is_seen)
        self._task = self._bar.add_task(what, total=1.0)
        self._bar.start()

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
