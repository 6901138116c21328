"""Files that are written from the code and kept in the repository: written anew, or only compared."""

import sys
from pathlib import Path


def keep(target: Path, text: str) -> int:
    """Write a generated file, or with ``--check`` compare it; return the exit status, 1 where it is out of date."""
    if "--check" not in sys.argv[1:]:
        target.write_text(text)
        print(f"wrote {target}")
        return 0
    if target.exists() and target.read_text() == text:
        return 0
    print(f"{target.name} is out of date: run `make references`", file=sys.stderr)
    return 1
