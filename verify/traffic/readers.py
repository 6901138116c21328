"""The readers of a campaign, as processes that are killed, stopped and started again."""

import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from verify.traffic.lines import read
from verify.traffic.notes import NOTES

_LIFE_SECONDS = 6.0, 24.0  # most of it after the start, which takes seconds of a core
_LEAVE_SECONDS = 60.0
_LOG = "readers.log"


class Readers:
    """Processes of :mod:`verify.traffic.reader`; every other one follows with a directory, which its lives share.

    They begin at once, and end with the ``with`` block. See :class:`verify.failpoint.torment.Victims`.

    Args:
        addresses: where they dial.
        directory: of their notes.
        count: how many at once.
        options: of the reader of this number: flags, without what is said here.
        seed: of their lives.

    Attributes:
        failures: of readers that ended by themselves.
        counts: of kills.
    """

    def __init__(
        self, addresses: list[str], directory: Path, count: int, options: Callable[[int], list[str]], *, seed: int
    ) -> None:
        self._addresses, self._directory, self._options = addresses, directory, options
        self._rng, self._lives = random.Random(seed), 0
        self._log = (directory / _LOG).open("ab")
        self._lock = threading.Lock()
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()
        self._processes = [self._begin(number) for number in range(count)]

    def __len__(self) -> int:
        return len(self._processes)

    def __enter__(self) -> "Readers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Have all end in order."""
        for number, process in enumerate(self._processes):
            self._note_end(number)
            process.terminate()
        for process in self._processes:
            try:
                process.wait(_LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                self.failures.append(f"a reader did not end in {_LEAVE_SECONDS:.0f} s")
                process.kill()
                process.wait()
        self._log.close()

    def kill(self, number: int) -> None:
        """Kill one at whatever it is doing; another life takes its place."""
        with self._lock:
            self._note_end(number)
            self._processes[number].kill()
            self._processes[number].wait()
            self.counts["readers killed"] += 1
            self._processes[number] = self._begin(number)

    def stop(self, number: int) -> None:
        """Let one stand still."""
        self._signal(number, signal.SIGSTOP)

    def resume(self, number: int) -> None:
        self._signal(number, signal.SIGCONT)

    def pid(self, number: int) -> int:
        """Process id of one."""
        return self._processes[number].pid

    def out(self, number: int) -> Path | None:
        """Directory with which one follows; ``None`` if it follows with a module."""
        return self._directory / f"followed-{number}" if number % 2 else None

    def notes(self, number: int) -> list[Path]:
        """Return the notes of each life of one, in order, as far as they are begun."""
        paths = self._directory.glob(NOTES.replace("*", f"{number}-*"))
        return sorted(paths, key=lambda path: int(path.stem.split("-")[2]))

    def seen(self) -> list[tuple[int, int, str]]:
        """Return what readers of a run have held: shard, version, digest of the values."""
        paths = [path for number in range(len(self)) for path in self.notes(number)]
        return [(shard, version, digest) for path in paths for shard, version, digest in read(path)]

    def has_said(self, words: str) -> bool:
        """Tell whether any of them has said these words so far."""
        return words in (self._directory / _LOG).read_text(encoding="utf-8", errors="replace")

    def _signal(self, number: int, which: signal.Signals) -> None:
        with self._lock:
            process = self._processes[number]
            if process.poll() is None:
                process.send_signal(which)

    def _note_end(self, number: int) -> None:
        process = self._processes[number]
        if process.poll() is not None:
            self.failures.append(f"reader {number} ended with status {process.returncode}: see {_LOG}")

    def _begin(self, number: int) -> "subprocess.Popen[bytes]":
        self._lives += 1
        flags = {
            "addresses": ",".join(self._addresses),
            "notes": self._directory / NOTES.replace("*", f"{number}-{self._lives}"),
            "seed": self._rng.getrandbits(32),
        }
        if (out := self.out(number)) is not None:
            flags["out"] = out
        arguments = [*(f"--{key}={value}" for key, value in flags.items()), *self._options(number)]
        return subprocess.Popen(
            [sys.executable, "-m", "verify.traffic.reader", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )


def run_options(size: int) -> Callable[[int], list[str]]:
    """Return the flags of readers of a run's model of this size: two of four have bfloat16."""
    return lambda number: [f"--size={size}", *(["--narrow"] if number % 4 > 1 else [])]


class Reaper:
    """Kills readers at random moments until the end of the ``with`` block."""

    def __init__(self, readers: Readers, seed: int) -> None:
        self._readers, self._rng, self._end = readers, random.Random(seed), threading.Event()
        self._thread = threading.Thread(target=self._work, name="reaper")

    def __enter__(self) -> "Reaper":
        if len(self._readers):
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if len(self._readers):
            self._thread.join()

    def _work(self) -> None:
        while not self._end.wait(self._rng.uniform(*_LIFE_SECONDS) / len(self._readers)):
            self._readers.kill(self._rng.randrange(len(self._readers)))
