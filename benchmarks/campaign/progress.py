"""How far the comparison is: a bar on a terminal, a line a run elsewhere, and the time that is left in both."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar


class Progress:
    """Shown on stderr; expects the work that is left to take as much longer than expected as what was done."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = Bar(BarColumn(24), TextColumn("{task.description}"), console=self._console)
        self._shown = self._bar.add_task("starting", total=None)
        self._started = time.monotonic()
        self._total = self._over = 0.0  # expected seconds: of everything, and of what is done
        self._expected = self._took = 0.0  # of what was done here, not read from the ledger

    def plan(self, expected_seconds: float) -> None:
        self._total += expected_seconds

    def begin(self, what: str) -> None:
        elapsed = time.monotonic() - self._started
        words = f"{what} ({_minutes(elapsed)} so far, {_minutes(self._left())} left)"
        if self._console.is_terminal:
            self._bar.update(self._shown, description=words, completed=self._over, total=max(self._total, self._over))
        else:
            self._console.print(words, markup=False, soft_wrap=True)

    def done(self, expected_seconds: float, seconds: float | None) -> None:
        """Count what is over; ``None`` seconds where it was done before."""
        self._over += expected_seconds
        if seconds is not None:
            self._expected += expected_seconds
            self._took += seconds

    def _left(self) -> float:
        slowness = self._took / self._expected if self._expected else 1.0
        return max(0.0, self._total - self._over) * slowness

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"
