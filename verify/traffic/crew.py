"""The workers of a campaign, as processes: started, killed, stopped, continued, and told to leave."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from verify.traffic.pusher import book_path


@dataclass(slots=True)
class _Member:
    """One worker: its life, and the process that lives it."""

    name: str
    life: int
    process: subprocess.Popen[bytes]


class Crew:
    """Raw workers.

    Args:
        addresses: where they dial.
        directory: of their books.
        count: how many.
        seed: of everything that they draw.
        size: elements of the model.
        pause: mean seconds between two pushes of a worker.
    """

    def __init__(
        self, addresses: list[str], directory: Path, count: int, *, seed: int, size: int, pause: float
    ) -> None:
        self._addresses, self._directory, self._seed, self._size, self._pause = addresses, directory, seed, size, pause
        self._members: list[_Member] = []
        self._lock = threading.Lock()
        self._log = (directory / "workers.log").open("ab")
        self._count = count
        self.failures: list[str] = []

    def start(self) -> None:
        """Start every worker's first life."""
        self._members = [
            _Member(name, 0, self._begin(name, 0)) for name in (f"worker-{number}" for number in range(self._count))
        ]

    def __len__(self) -> int:
        return self._count

    def books(self) -> list[Path]:
        """Return the book of each life so far."""
        return [
            path
            for member in self._members
            for life in range(member.life + 1)
            if (path := book_path(self._directory, member.name, life)).exists()
        ]

    def kill(self, number: int) -> None:
        """Kill a worker at whatever it is doing, and begin its next life."""
        member = self._members[number]
        with self._lock:
            self._note_end(member)
            member.process.kill()
            member.process.wait()
            member.life += 1
            member.process = self._begin(member.name, member.life)

    def stop(self, number: int) -> None:
        """Let a worker stand still."""
        self._signal(number, signal.SIGSTOP)

    def resume(self, number: int) -> None:
        self._signal(number, signal.SIGCONT)

    def leave(self, seconds: float) -> None:
        """Tell all to settle what they have in doubt and to leave, and wait."""
        for number in range(len(self._members)):
            self._signal(number, signal.SIGCONT)
            self._signal(number, signal.SIGTERM)
        end = time.monotonic() + seconds
        for member in self._members:
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.process.wait(max(0.1, end - time.monotonic()))
            self._note_end(member)
            if member.process.poll() is None:
                self.failures.append(f"{member.name} did not leave in {seconds:.0f} s")

    def close(self) -> None:
        """End what still runs."""
        for member in self._members:
            if member.process.poll() is None:
                member.process.kill()
            member.process.wait()
        self._log.close()

    def _note_end(self, member: _Member) -> None:
        """Note a worker that ended by itself with an error."""
        early = member.process.poll() == -signal.SIGTERM  # told to leave before it could listen: it has done nothing
        if early and not book_path(self._directory, member.name, member.life).exists():
            return
        if member.process.poll():
            self.failures.append(f"{member.name}, life {member.life}, ended with status {member.process.returncode}")

    def _signal(self, number: int, which: signal.Signals) -> None:
        with self._lock:
            process = self._members[number].process
            if process.poll() is None:
                process.send_signal(which)

    def _begin(self, name: str, life: int) -> subprocess.Popen[bytes]:
        options = {
            "addresses": ",".join(self._addresses),
            "books": self._directory,
            "name": name,
            "life": life,
            "seed": self._seed,
            "size": self._size,
            "pause": self._pause,
        }
        return subprocess.Popen(
            [sys.executable, "-m", "verify.traffic.pusher", *(f"--{key}={value}" for key, value in options.items())],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
