"""A place for a data directory, on a disk whose power can be cut."""

import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from verify.forgetful.tree import Kind

_ANSWER_SECONDS = 60.0


class NoForgetfulDiskError(Exception):
    """No file system can be mounted here; the message says why."""


class Cut(NamedTuple):
    """A power cut.

    Attributes:
        at_what: change of the file system at which it came.
        at: seconds of the system's monotonic clock.
    """

    at_what: str
    at: float


class ForgetfulDisk:
    """A mounted file system of :mod:`verify.forgetful.filesystem`; a context manager that takes the mount away.

    Raises :class:`NoForgetfulDiskError`.

    Args:
        path: where it is mounted; made if it is not there.
        seed: of what is kept in a cut.
    """

    def __init__(self, path: Path, seed: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._ordering = threading.Lock()
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._cuts: queue.Queue[Cut] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "verify.forgetful.filesystem", str(path), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._ear = threading.Thread(target=self._hear, daemon=True)
        self._ear.start()
        try:
            self._await_answer()
        except BaseException:
            self.close()
            raise

    def arm(self, victim: int, after: int = -1) -> None:
        """Cut the power at a later change, behind so many more, or at none if negative.

        The process of the id ``victim``, if it is not 0, is killed with any cut, before the call that is cut returns.
        """
        self._order("arm", victim=victim, after=after)

    def disarm(self) -> Cut | None:
        """Cut at no change that comes from now on, and kill nobody; return the cut that came before."""
        self.arm(0)
        return None if self._cuts.empty() else self._cuts.get()

    def await_cut(self, seconds: float) -> Cut:
        """Wait until an armed cut has come; after so many seconds cut at whatever is being done."""
        try:
            return self._cuts.get(timeout=seconds)
        except queue.Empty:
            return self.cut()

    def cut(self) -> Cut:
        """Cut the power now, unless an armed cut has come before; return the cut."""
        self._order("cut")
        return self._cuts.get()

    def come_back(self, kind: Kind) -> None:
        """Have what the disk has kept; no process may have a file open. ``kind`` holds for the next cut."""
        self._order("come back", kind=kind)

    def close(self) -> None:
        """Unmount, and end the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._ear.join()

    def __enter__(self) -> "ForgetfulDisk":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _order(self, order: str, **more: object) -> None:
        """Give an order, and wait until it is done."""
        assert self._process.stdin is not None
        with self._ordering:
            self._process.stdin.write(json.dumps({"order": order, **more}) + "\n")
            self._process.stdin.flush()
            self._await_answer()

    def _await_answer(self) -> None:
        try:
            answer = self._answers.get(timeout=_ANSWER_SECONDS)
        except queue.Empty:
            raise NoForgetfulDiskError(f"the file system has not answered for {_ANSWER_SECONDS:.0f} s") from None
        if "refused" in answer:
            raise NoForgetfulDiskError(answer["refused"])

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said: dict[str, Any] = json.loads(line)
            if "cut" in said:
                self._cuts.put(Cut(said["cut"], said["at"]))
            else:
                self._answers.put(said)
        self._answers.put({"refused": "the file system's process has ended"})
