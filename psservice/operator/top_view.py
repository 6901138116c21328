"""One frame of ``psservice top``: for a terminal, and as plain values."""

import time
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pscore.names import escaped
from pscore.units import human_bytes
from psservice.observability.protojson import plain
from psservice.operator.fleet import Look, Rates, saved_bytes, saved_share
from psservice.operator.render import cell, error_plain, evicted, state_of, worker_plain, worker_table

WIDE_COLUMNS = 110
"""From so many columns on everything is shown."""

_FEWEST_WORKERS_SHOWN = 3
_FRAME_LINES = 4
"""Of a table, around its rows."""


def frame_plain(found: Look, rates: dict[str, Rates]) -> dict[str, Any]:
    """Return a frame for JSON: shards with their rates, and all workers."""
    shards: list[dict[str, Any]] = []
    for address, status in found.reached.items():
        moved = rates.get(address)
        values = plain(status)
        del values["workers"], values["evicted"]  # they follow, joined over the shards
        shards.append(
            {
                "address": address,
                **values,
                "saved_bytes": saved_bytes(status),
                "pushes_per_second": moved.pushes if moved else None,
                "pulls_per_second": moved.pulls if moved else None,
                "push_bytes_per_second": moved.push_bytes if moved else None,
                "pull_bytes_per_second": moved.pull_bytes if moved else None,
            }
        )
    shards += [{"address": address, **error_plain(error)} for address, error in found.errors.items()]
    return {
        "unix_seconds": time.time(),
        "shards": shards,
        "workers": [worker_plain(worker) for worker in found.workers()],
        "evicted": evicted(found),
    }


def frame(found: Look, rates: dict[str, Rates], columns: int, lines: int | None = None) -> RenderableType:
    """Return a frame for a terminal of so many columns and lines; ``None`` for as many lines as it takes."""
    workers = found.workers()
    below = [cell(f"{name}: evicted, may come back in {seconds:.0f} s") for name, seconds in evicted(found).items()]
    hidden = 0
    if lines is not None:
        taken = 1 + len(found.shards) + 2 * _FRAME_LINES + len(below) + 1  # headline, shards, workers' table, one below
        hidden = max(0, len(workers) - max(_FEWEST_WORKERS_SHOWN, lines - taken))
    if hidden:
        below.insert(0, Text(f"and {hidden} more workers: make the terminal higher, or see psservice workers", "dim"))
    shown = workers[: len(workers) - hidden]
    wide = columns >= WIDE_COLUMNS
    table = worker_table(shown, wide=wide) if workers else Text("no live workers", "dim")
    return Group(_headline(found, len(workers)), _shard_table(found, rates, wide=wide), table, *below)


def _headline(found: Look, workers: int) -> Text:
    first = next(iter(found.reached.values()), None)
    text = Text(no_wrap=True, overflow="ellipsis")
    if first is None:
        return text.append("no shard answers", "bold red")
    text.append(escaped(f"run {first.run_id or '–'}"), "bold")
    text.append(
        f"  {escaped(first.method) or 'no method yet'}, {first.parameters:,} parameters, "
        f"{len(found.reached)} of {first.num_shards} shards, {workers} workers, {first.samples:,} samples"
    )
    return text


def _shard_table(found: Look, rates: dict[str, Rates], *, wide: bool) -> Table:
    """Return the table of shards; in a narrow terminal those that answer go without address and snapshot."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1))
    table.add_column("shard", justify="right", no_wrap=True)
    if wide:
        table.add_column("address", overflow="ellipsis", no_wrap=True)
    table.add_column("state", overflow="ellipsis", no_wrap=True)
    figures = ["version", "pushes/s", "up/s", "down/s", "saved", "queue", *(["snapshot"] if wide else [])]
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    for address, status in found.reached.items():
        moved = rates.get(address)
        share = saved_share(status)
        age = f"{status.snapshot_age_seconds:.0f} s ago" if status.snapshot_age_seconds else "–"
        table.add_row(
            str(status.shard_index),
            *([cell(address)] if wide else []),
            cell(state_of(status), "yellow" if status.draining or not status.durable else ""),
            f"{status.version:,}",
            f"{moved.pushes:.1f}" if moved else "–",
            human_bytes(moved.push_bytes) if moved else "–",
            human_bytes(moved.pull_bytes) if moved else "–",
            f"{share:.1%}" if share is not None else "–",
            f"{status.queued}/{status.queue_limit}",
            *([age] if wide else []),
        )
    for address, error in found.errors.items():
        why = "refuses" if error.refused else "no answer"
        place = [cell(address)] if wide else []
        state = cell(why if wide else f"{address}: {why}", "bold red")
        table.add_row("?", *place, state, *["–"] * len(figures))
    return table
