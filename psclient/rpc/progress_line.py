"""How far a model has come on its way to the servers or from them: a bar, and a line in the log now and then."""

import logging
import time
from types import TracebackType
from typing import Any

log = logging.getLogger("psclient")

_QUIET_SECONDS = 3.0  # what takes no longer needs no words
_LINE_SECONDS = 10.0  # between two lines


class WaitLine:
    """Shows one transfer: on a terminal or in a notebook as a bar, and in the log; nothing where it is quick.

    A context, at whose end the bar goes.
    """

    def __init__(self) -> None:
        """Show nothing yet."""
        self._began = self._last_line = time.monotonic()
        self._bar: Any = None  # rich's, which is loaded when there is something to show
        self._task: Any = None

    def show(self, what: str, share: float, seconds_left: float | None = None) -> None:
        """Say how far it is.

        Args:
            what: as "w0 uploads the model".
            share: 0 to 1.
            seconds_left: until the end; worked out from the time until now where it is not known.
        """
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

    def __enter__(self) -> "WaitLine":
        """Return this."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
