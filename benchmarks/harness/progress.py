"""Progress on stderr: a live line on a terminal, plain lines elsewhere, and the time that is left if it is known."""

import time
from types import TracebackType

from rich.console import Console
from rich.status import Status


class Progress:
    """Says what is done, of which section; a context manager.

    It expects what is left to take as much longer than planned as what was done.

    Args:
        sections: how many there will be.
    """

    def __init__(self, sections: int = 0) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live: Status | None = self._console.status("starting") if self._console.is_terminal else None
        self._sections, self._number, self._title = sections, 0, ""
        self._started = time.monotonic()
        self._total = self._over = 0.0  # planned seconds: of everything, and of what is done
        self._planned = self._took = 0.0  # of what was done here, not read from the journal

    def section(self, title: str) -> None:
        """Begin a section."""
        self._number += 1
        self._title = f"[{self._number}/{self._sections}] {title}"
        self.say("")

    def say(self, what: str) -> None:
        """Show what begins."""
        elapsed = _minutes(time.monotonic() - self._started)
        words = ": ".join(filter(None, (self._title, what)))
        if self._total:
            slowness = self._took / self._planned if self._planned else 1.0
            elapsed += f" so far, {_minutes(max(0.0, self._total - self._over) * slowness)} left"
        if self._live is not None:
            self._live.update(f"{words} ({elapsed})")
        else:
            self._console.print(f"{words} ({elapsed})", markup=False, soft_wrap=True)

    def plan(self, seconds: float) -> None:
        """Expect more work."""
        self._total += seconds

    def done(self, planned: float, seconds: float | None) -> None:
        """Count what is over; ``None`` seconds if it was done before."""
        self._over += planned
        if seconds is not None:
            self._planned += planned
            self._took += seconds

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"
