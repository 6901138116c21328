"""The publisher of a feed, life after life, and a second one now and then."""

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from verify.cluster.waiting import until
from verify.traffic.publications import PUBLISHERS, Publication, read_books

_LEAVE_SECONDS = 90.0


class PublisherFailedError(Exception):
    """A publisher ended by itself, or does not leave."""


class _Life(NamedTuple):
    """A process, its book, and whether it may end by a kill."""

    process: "subprocess.Popen[bytes]"
    book: Path
    may_die: bool


class Publishers:
    """Processes of :mod:`verify.traffic.publisher`: one that publishes, and others beside it.

    Args:
        addresses: where they dial.
        directory: of their books and baselines.
        layout: of the feed.
        seed: of their lives.
    """

    def __init__(self, addresses: list[str], directory: Path, layout: str, seed: int) -> None:
        self._addresses, self._directory, self._layout, self._seed = addresses, directory, layout, seed
        self._log = (directory / "publishers.log").open("ab")
        self._lives = 0
        self._second: subprocess.Popen[bytes] | None = None
        self._life: _Life | None = None
        self.baseline = directory / "baseline"

    def begin(self, parent: str = "", dies: str = "", after: int = 0) -> None:
        """Begin the next life, which goes on from a model, or from the newest; ``dies``: where it kills itself."""
        more = [f"--dies={dies}", f"--after={after}"] if dies else []
        process = self._start(parent or self._newest(), self.baseline, more)
        self._life = _Life(process, self._book, may_die=bool(dies))

    def begin_second(self, parent: str, baseline: Path) -> None:
        """Begin another publisher beside the first one."""
        self._second = self._start(parent, baseline, [])

    def end_second(self) -> None:
        """Kill the other publisher."""
        if self._second is not None:
            second, self._second = self._second, None
            second.send_signal(signal.SIGKILL)
            second.wait()

    def kill(self) -> None:
        """Kill the publisher at whatever it is doing; raises :class:`PublisherFailedError` if it has ended before."""
        self.check()
        life = self._life = self._living()._replace(may_die=True)  # another thread may look before the next has begun
        life.process.kill()
        life.process.wait()

    def check(self) -> None:
        """Raise :class:`PublisherFailedError` if the publisher has ended by itself, and was not told to die."""
        life = self._living()
        status = life.process.poll()
        if status is not None and not (life.may_die and status == -signal.SIGKILL):
            raise PublisherFailedError(f"the publisher ended with status {status}: see publishers.log")

    def has_died(self, seconds: float) -> bool:
        """Wait until the publisher has killed itself, for at most so long; tell whether it has."""
        try:
            self._living().process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> None:
        """Let the publisher stand still."""
        self._living().process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._living().process.send_signal(signal.SIGCONT)

    def leave(self) -> None:
        """Have the publisher publish once more and leave; raises :class:`PublisherFailedError`."""
        process, book, _ = self._living()
        until(lambda: book.exists() or process.poll() is not None, _LEAVE_SECONDS)  # it listens from then on
        process.terminate()
        try:
            status = process.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            raise PublisherFailedError(f"the publisher has not published in {_LEAVE_SECONDS:.0f} s") from None
        if status:
            raise PublisherFailedError(f"the publisher ended with status {status}: see publishers.log")

    def close(self) -> None:
        """End what still runs."""
        self.end_second()
        if self._life is not None and self._life.process.poll() is None:
            self._life.process.kill()
            self._life.process.wait()
        self._log.close()

    def books(self) -> tuple[dict[str, Publication], Counter[str]]:
        """Return all publications so far, by name, and the troubles."""
        found, troubles = read_books(self._directory.glob(PUBLISHERS))
        return found, Counter(troubles)

    def _newest(self) -> str:
        found, _ = self.books()
        return max(found.values(), key=lambda each: each.begun).name if found else ""

    @property
    def _book(self) -> Path:
        """The book of the life that has begun last."""
        return self._directory / PUBLISHERS.replace("*", f"life-{self._lives}")

    def _living(self) -> "_Life":
        assert self._life is not None
        return self._life

    def _start(self, parent: str, baseline: Path, more: list[str]) -> "subprocess.Popen[bytes]":
        self._lives += 1
        options = {
            "addresses": ",".join(self._addresses),
            "books": self._directory,
            "name": f"life-{self._lives}",
            "baseline": baseline,
            "layout": self._layout,
            "parent": parent,
            "seed": self._seed + self._lives,
        }
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "verify.traffic.publisher",
                *(f"--{key}={value}" for key, value in options.items()),
                *more,
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
