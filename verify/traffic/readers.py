"""The readers of a campaign, as processes that are killed and started again until the end of the ``with`` block."""

import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import TracebackType

from verify.traffic.reader import NOTES, read

_LIFE_SECONDS = 6.0, 24.0  # most of it after the start, which takes seconds of a core
_LEAVE_SECONDS = 60.0


class Readers:
    """Processes of :mod:`verify.traffic.reader`; every other one follows with a directory, which its lives share.

    Two of four have bfloat16.

    Args:
        addresses: where they dial.
        directory: of their notes.
        count: how many at once.
        size: elements of the model.
        seed: of their lives.

    Attributes:
        failures: of readers that ended by themselves.
        counts: of kills.
    """

    def __init__(self, addresses: list[str], directory: Path, count: int, *, size: int, seed: int) -> None:
        self._addresses, self._directory, self._size = addresses, directory, size
        self._rng, self._lives = random.Random(seed), 0
        self._log = (directory / "readers.log").open("ab")
        self._end = threading.Event()
        self._processes = [self._begin(number) for number in range(count)]
        self._thread = threading.Thread(target=self._work, name="readers")
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> "Readers":
        if self._processes:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Have all end in order."""
        self._end.set()
        if self._processes:
            self._thread.join()
        for number, process in enumerate(self._processes):
            self._note_end(number, process)
            process.terminate()
        for process in self._processes:
            try:
                process.wait(_LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                self.failures.append(f"a reader did not end in {_LEAVE_SECONDS:.0f} s")
                process.kill()
                process.wait()
        self._log.close()

    def seen(self) -> list[tuple[int, int, str]]:
        """Return what readers have held: shard, version, digest of the values."""
        return [line for path in sorted(self._directory.glob(NOTES)) for line in read(path)]

    def _work(self) -> None:
        while not self._end.wait(self._rng.uniform(*_LIFE_SECONDS) / len(self._processes)):
            number = self._rng.randrange(len(self._processes))
            process = self._processes[number]
            self._note_end(number, process)
            process.kill()
            process.wait()
            self.counts["readers killed"] += 1
            self._processes[number] = self._begin(number)

    def _note_end(self, number: int, process: "subprocess.Popen[bytes]") -> None:
        if process.poll() is not None:
            self.failures.append(f"reader {number} ended with status {process.returncode}: see readers.log")

    def _begin(self, number: int) -> "subprocess.Popen[bytes]":
        self._lives += 1
        options = {
            "addresses": ",".join(self._addresses),
            "notes": self._directory / f"reader-{number}-{self._lives}.notes",
            "size": self._size,
            "seed": self._rng.getrandbits(32),
        }
        if number % 2:
            options["out"] = self._directory / f"followed-{number}"
        arguments = [f"--{key}={value}" for key, value in options.items()]
        return subprocess.Popen(
            [sys.executable, "-m", "verify.traffic.reader", *arguments, *(["--narrow"] if number % 4 > 1 else [])],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
