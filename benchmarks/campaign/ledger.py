"""The runs that were done, a line of JSON each: a comparison that was interrupted goes on where it was."""

import json
from pathlib import Path
from typing import Any


class Ledger:
    """A file of finished work, by key.

    Args:
        path: of the file; made with its first line.
    """

    def __init__(self, path: Path) -> None:
        """Read what is there; a last line that was cut off in the writing counts for nothing."""
        self._path = path
        self._found: dict[str, dict[str, Any]] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        for line in whole.splitlines():
            entry = json.loads(line)
            self._found[entry["key"]] = entry["value"]

    def get(self, key: str) -> dict[str, Any] | None:
        """Return what was kept under a key."""
        return self._found.get(key)

    def keep(self, key: str, value: dict[str, Any]) -> None:
        """Write it down at once."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "value": value}) + "\n")
        self._found[key] = value
