"""Work that is done once: each result is a line of JSON, and a campaign that was interrupted goes on where it was."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

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
    """A file of finished work, by key.

    Args:
        path: of the file; made with its first line.
        watcher: is told.
        does: whether work that is not in the file is done.

    Attributes:
        failures: what went wrong, in words; the next call tries it again.
    """

    def __init__(self, path: Path, watcher: Watcher, *, does: bool = True) -> None:
        """Read what is there; a last line that was cut off in the writing counts for nothing."""
        self.watcher = watcher
        self.failures: list[str] = []
        self._path, self._does = path, does
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        entries = map(json.loads, whole.splitlines())
        self._found: dict[str, dict[str, Any]] = {entry["key"]: entry["value"] for entry in entries}

    def once(
        self, key: str, words: str, planned_seconds: float, do: Callable[[], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Return what the file has, or what ``do`` returns; ``None`` if that fails, or if nothing is to be done."""
        if key in self._found or not self._does:
            self.watcher.done(planned_seconds, None)
            return self._found.get(key)
        self.watcher.say(words)
        started = time.monotonic()
        try:
            found = do()
        except (ChildFailedError, SparsepsError) as error:
            self.failures.append(f"{words}: {error}")
            return None
        finally:
            self.watcher.done(planned_seconds, time.monotonic() - started)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "value": found}) + "\n")
        self._found[key] = found
        return found
