"""The lines of metrics.jsonl, which a kill may have cut."""

import json
from pathlib import Path
from typing import Any

NAME = "metrics.jsonl"


def read(run: Path) -> list[dict[str, Any]]:
    """Return what a run has reported, in order, without lines that a kill has cut; empty if it has reported nothing."""
    path = run / NAME
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return [found for found in map(_parsed, lines) if found]


def _parsed(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
