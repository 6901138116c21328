"""Progress while the benchmarks run: a live line on a terminal, plain lines elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.status import Status


class Progress:
    """Says which section runs and what it is at."""

    def __init__(self, sections: int) -> None:
        """Show on stderr, so that the report alone goes to stdout."""
        self._console = Console(stderr=True, highlight=False)
        self._live: Status | None = self._console.status("starting") if self._console.is_terminal else None
        self._sections = sections
        self._number = 0
        self._title = ""
        self._started = time.perf_counter()

    def section(self, title: str) -> None:
        self._number += 1
        self._title = f"[{self._number}/{self._sections}] {title}"
        self._show(self._title)

    def say(self, what: str) -> None:
        self._show(f"{self._title}: {what}")

    def _show(self, text: str) -> None:
        elapsed = time.perf_counter() - self._started
        if self._live is not None:
            self._live.update(f"{text} ({elapsed:.0f} s)")
        else:
            self._console.print(f"{elapsed:6.1f} s  {text}", markup=False, soft_wrap=True)

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
