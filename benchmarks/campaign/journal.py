"""Work that is done once: each result is a line of JSON, and a campaign that was interrupted goes on where it was."""

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from benchmarks.harness import machine
from benchmarks.harness.children import ChildFailedError
from psclient.errors import SparsepsError


class Watcher(Protocol):
    """Is told how far it is, in planned seconds of work."""

    def plan(self, seconds: float) -> None:
        """Expect more work."""

    def say(self, what: str) -> None:
        """See something begin."""

    def done(self, planned: float, seconds: float | None) -> None:
        """See something end; ``None`` seconds if it was done before."""


class Journal:
    """Files of finished work, by key; each line says at which commit it was done.

    Args:
        path: of the file that is written; made with its first line.
        watcher: is told.
        does: whether work that is not in a file is done.
        kept: a file with runs that the repository keeps, which is read too.

    Attributes:
        failures: what went wrong, in words; the next call tries it again.
    """

    def __init__(self, path: Path, watcher: Watcher, *, does: bool = True, kept: Path | None = None) -> None:
        """Read what is there; a last line that was cut off in the writing counts for nothing."""
        self.watcher = watcher
        self.failures: list[str] = []
        self._path, self._does, self._kept = path, does, kept
        self._in_repository = {} if kept is None or not kept.exists() else _entries(kept.read_text(encoding="utf-8"))
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        self._found = self._in_repository | _entries(whole)
        self._used: dict[str, None] = {}

    @property
    def commits(self) -> Counter[str]:
        """How many of the runs that were asked for were done at which commit."""
        return Counter(self._found[key].get("commit", "") or "a commit that was not noted" for key in self._used)

    def once(
        self, key: str, words: str, planned_seconds: float, do: Callable[[], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Return what a file has, or what ``do`` returns; ``None`` if that fails, or if nothing is to be done."""
        if key not in self._found and self._does:
            self._do(key, words, planned_seconds, do)
        else:
            self.watcher.done(planned_seconds, None)
        if key not in self._found:
            return None
        self._used[key] = None
        found: dict[str, Any] = self._found[key]["value"]
        return found

    def keep(self) -> None:
        """Add the runs that were asked for to those that the repository keeps."""
        assert self._kept is not None
        lines = [_line(self._found[key]) for key in self._used if key not in self._in_repository]
        self._kept.parent.mkdir(parents=True, exist_ok=True)
        with self._kept.open("a", encoding="utf-8") as file:
            file.writelines(lines)
        self._in_repository |= {key: self._found[key] for key in self._used}

    def _do(self, key: str, words: str, planned_seconds: float, do: Callable[[], dict[str, Any]]) -> None:
        self.watcher.say(words)
        started = time.monotonic()
        try:
            entry = {"key": key, "commit": machine.commit(), "value": do()}
        except (ChildFailedError, SparsepsError) as error:
            self.failures.append(f"{words}: {error}")
            return
        finally:
            self.watcher.done(planned_seconds, time.monotonic() - started)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(entry))
        self._found[key] = entry


def _entries(lines: str) -> dict[str, dict[str, Any]]:
    return {entry["key"]: entry for entry in map(json.loads, lines.splitlines())}


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry) + "\n"
