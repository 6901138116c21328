"""Lines of JSON in a file, each in the kernel's hands once it is added: whoever is killed takes nothing along."""

import json
import os
from pathlib import Path
from typing import Any


class Lines:
    """Appends lines to a file, which may be there already."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def add(self, *lines: Any) -> None:
        """Add lines in one write."""
        os.write(self._descriptor, b"".join(json.dumps(line).encode() + b"\n" for line in lines))

    def close(self) -> None:
        os.close(self._descriptor)


def read(path: Path) -> list[Any]:
    """Return the lines of a file; the last one may have been cut by a kill."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
