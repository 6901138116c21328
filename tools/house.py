"""Measures the structure: ``python -m tools.house`` prints rooms, lines, floors and imports that point up.

A room is a folder or a file directly inside a package. A room's floor is one above the highest room that it imports.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {
    "pscore": [
        ["__init__", "warmup"],
        ["net", "reader"],
        ["wire"],
        ["model", "selection", "telemetry"],
        ["config", "jit", "pointers"],
        ["files", "names", "streams", "units", "version"],
    ],
    "psclient": [
        ["__init__", "__main__"],
        ["cli", "data", "integrations", "schedules"],
        ["node"],
        ["optim", "publisher"],
        ["engine", "reader"],
        ["rpc"],
        ["compress"],
        ["buckets", "model"],
        ["budget", "executor", "ranks", "report", "rounds", "settings"],
        ["whole_numbers"],
        ["errors"],
    ],
    "psservice": [
        ["__main__"],
        ["cli"],
        ["process", "ctl"],
        ["warmup"],
        ["standby"],
        ["relay", "web"],
        ["rpc"],
        ["shard"],
        ["durability"],
        ["rounds", "wagma"],
        ["synchronizer"],
        ["apply_thread", "membership"],
        ["state"],
        ["cuts", "data_leases", "feed"],
        ["backups"],
        ["storage"],
        ["observability"],
        ["replies"],
        ["model"],
        ["rules"],
        ["__init__", "awaiting", "memory_budget", "settings"],
        ["values"],
    ],
}
"""The rooms of each package, upper rows first: a room imports only lower rows (docs/internals/architecture.md)."""


def modules(package: str, root: Path = ROOT) -> dict[str, Path]:
    """Return every module of a package by its dotted name, without generated stubs."""
    found = {}
    for path in sorted((root / package).rglob("*.py")):
        if "_pb2" not in path.name:
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports, at its top and inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows(package: str, root: Path = ROOT) -> dict[tuple[str, str], set[str]]:
    """Return the imports between rooms: from which room to which, and the files that import."""
    found: dict[tuple[str, str], set[str]] = {}
    known = modules(package, root)
    for name, path in known.items():
        source = room_of(name)
        for target in imports(path):
            if target in known or target.rpartition(".")[0] in known:
                room = room_of(target if target in known else target.rpartition(".")[0])
                if target.startswith(package + ".") and room != source:
                    found.setdefault((source, room), set()).add(str(path.relative_to(root)))
    return found


def room_of(module: str) -> str:
    """Return the room of a module; of the package itself, ``__init__``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def floors(package: str, root: Path = ROOT) -> dict[str, int]:
    """Return each room's floor; raises ``ValueError`` where rooms import one another in a circle."""
    below: dict[str, set[str]] = {room_of(name): set() for name in modules(package, root)}
    for source, target in arrows(package, root):
        below[source].add(target)
    found: dict[str, int] = {}

    def floor(room: str, above: tuple[str, ...]) -> int:
        if room in above:
            raise ValueError(f"{package}: {' → '.join((*above, room))}")
        if room not in found:
            found[room] = 1 + max((floor(other, (*above, room)) for other in sorted(below[room])), default=0)
        return found[room]

    for room in below:
        floor(room, ())
    return found


def upward(package: str, root: Path = ROOT) -> list[str]:
    """Return the imports that do not point from an upper row of :data:`ROOMS` to a lower one."""
    row = {room: number for number, rooms in enumerate(ROOMS[package]) for room in rooms}
    row |= dict.fromkeys({room_of(name) for name in modules(package, root)} - row.keys(), -1)  # unknown: refused below
    return [
        f"{source} imports {target}: {', '.join(sorted(files))}"
        for (source, target), files in sorted(arrows(package, root).items())
        if row[source] >= row[target]
    ]


def main() -> int:
    """Print the table; return 1 where an import points up."""
    table = Table("package", "rooms", "files", "lines", "floors", "imports that point up", "fullest folder")
    bad = 0
    for package in ROOMS:
        paths = modules(package)
        folders = [path.parent for path in paths.values() if path.name != "__init__.py"]
        fullest = max(folders, key=folders.count)
        pointing_up = upward(package)
        bad += len(pointing_up)
        table.add_row(
            package,
            str(len({room_of(name) for name in paths})),
            str(len(paths)),
            str(sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths.values())),
            str(max(floors(package).values())),
            "; ".join(pointing_up) or "0",
            f"{fullest.relative_to(ROOT)}: {folders.count(fullest)} files",
        )
    Console().print(table)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
