"""Trainers as processes, each life under a name of its own, with a thread that hears what they say."""

import json
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from verify.cluster.release_before import environment, python


class TrainerFailedError(Exception):
    """A trainer ended, or does not answer."""


class Trainer:
    def __init__(
        self,
        name: str,
        server: str,
        log: Any,
        *,
        seed: int,
        hidden: int,
        pause: float,
        overlap: bool,
        packages: Path | None,
    ) -> None:
        self.name, self.overlap = name, overlap
        self.steps = 0
        self.agreed: dict[str, Any] = {}
        self.round_trips: list[tuple[float, float]] = []
        self._said: dict[str, dict[str, Any]] = {}
        self._changed = threading.Condition()
        options = {"server": server, "name": name, "seed": seed, "hidden": hidden, "pause": pause}
        self.process = subprocess.Popen(
            [
                *python(packages),
                "-m",
                "verify.traffic.trainer",
                *(f"--{key}={value}" for key, value in options.items()),
                *(["--overlap"] if overlap else []),
            ],
            env=environment(packages),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()

    def ask(self, word: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise TrainerFailedError(f"{self.name} has ended") from error

    def answer(self, key: str, seconds: float) -> dict[str, Any]:
        """Wait for the line that has this key."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._said or not self._thread.is_alive(), seconds)
            if key not in self._said:
                raise TrainerFailedError(f"{self.name} has not {key} in {seconds:.0f} s")
            return self._said[key]

    def kill(self) -> None:
        """End it at whatever it is doing, and hear its last words."""
        self.process.kill()
        self.process.wait()
        self._thread.join()

    def end(self, seconds: float) -> int:
        """Let it leave; return its status."""
        self.ask("leave")
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TrainerFailedError(f"{self.name} did not leave in {seconds:.0f} s") from None

    def _hear(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                continue
            with self._changed:
                if "ms" in said:
                    self.steps = said["step"]
                    self.round_trips.append((time.monotonic(), said["ms"]))
                if "method" in said:
                    self.agreed = said
                self._said.update(dict.fromkeys(said, said))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


class Team:
    """Trainers that are killed, stopped and replaced; see :class:`verify.failpoint.torment.Victims`.

    Attributes:
        packages: folder from which trainers that begin from now on import psclient; ``None``: this repository's.
    """

    def __init__(self, server: str, directory: Path, count: int, *, hidden: int, pause: float) -> None:
        """Start them; every other one overlaps."""
        self._server, self._hidden, self._pause = server, hidden, pause
        self._log = (directory / "trainers.log").open("ab")
        self._lock = threading.Lock()
        self.living: list[Trainer] = []
        self.dead: list[Trainer] = []
        self._started = 0
        self.packages: Path | None = None
        for number in range(count):
            self.add(overlap=bool(number % 2))

    def add(self, *, overlap: bool) -> None:
        """Begin one more."""
        self.living.append(self.begin(overlap=overlap))

    def begin(self, *, overlap: bool) -> Trainer:
        self._started += 1
        return Trainer(
            f"trainer-{self._started}",
            self._server,
            self._log,
            seed=self._started,
            hidden=self._hidden,
            pause=self._pause,
            overlap=overlap,
            packages=self.packages,
        )

    def __len__(self) -> int:
        return len(self.living)

    def kill(self, number: int) -> None:
        """Kill one; another takes its place."""
        with self._lock:
            old = self.living[number]
            old.kill()
            self.dead.append(old)
            self.living[number] = self.begin(overlap=old.overlap)

    def stop(self, number: int) -> None:
        """Let one stand still."""
        self._signal(number, signal.SIGSTOP)

    def resume(self, number: int) -> None:
        self._signal(number, signal.SIGCONT)

    def close(self) -> None:
        """End what still runs."""
        for trainer in self.living:
            if trainer.process.poll() is None:
                trainer.kill()
        self._log.close()

    def _signal(self, number: int, which: signal.Signals) -> None:
        with self._lock:
            process = self.living[number].process
            if process.poll() is None:
                process.send_signal(which)
