"""One frame of ``psservice top``: for a terminal, and as plain values."""

import dataclasses
import time
from operator import itemgetter
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pscore.names import escaped
from pscore.units import human_bytes
from psservice.observability.protojson import plain
from psservice.operator.client import Outcome
from psservice.operator.fleet import RATES, Fleet, Rates, saved_bytes, saved_share
from psservice.operator.render import Column, cell, error_plain, evicted_lines, state_of, table_of, worker_table

WIDE_COLUMNS = 110
"""Width of a terminal from which everything is shown."""

_FEWEST_WORKERS_SHOWN = 3
_TABLE_LINES = 4  # of a table, around its rows


def frame_plain(fleet: Fleet, rates: dict[str, Rates]) -> dict[str, Any]:
    """Return a frame for JSON: shards with their rates, and all workers."""
    shards: list[dict[str, Any]] = []
    for address, status in fleet.reached.items():
        values = plain(status)
        del values["workers"], values["evicted"]  # they follow, joined over the shards
        unknown = {f"{name}_per_second": None for name in RATES}
        shards.append({"address": address, **values, "saved_bytes": saved_bytes(status), **rates.get(address, unknown)})
    shards += [{"address": address, **error_plain(error)} for address, error in fleet.errors.items()]
    return {
        "unix_seconds": time.time(),
        "shards": shards,
        "workers": [dataclasses.asdict(worker) for worker in fleet.workers()],
        "evicted": fleet.evicted(),
    }


def frame(fleet: Fleet, rates: dict[str, Rates], columns: int, lines: int | None = None) -> RenderableType:
    """Return a frame for a terminal of so many columns and lines; ``None`` for as many lines as the frame needs."""
    workers = fleet.workers()
    below = evicted_lines(fleet)
    hidden = 0
    if lines is not None:
        taken = 1 + len(fleet.shards) + 2 * _TABLE_LINES + len(below) + 1  # headline, shards, workers' table, one below
        hidden = max(0, len(workers) - max(_FEWEST_WORKERS_SHOWN, lines - taken))
    if hidden:
        below.insert(0, Text(f"and {hidden} more workers: make the terminal higher, or see psservice workers", "dim"))
    wide = columns >= WIDE_COLUMNS
    table = worker_table(workers[: len(workers) - hidden], wide=wide) if workers else Text("no live workers", "dim")
    return Group(_headline(fleet, len(workers)), _shard_table(fleet, rates, wide=wide), table, *below)


def _headline(fleet: Fleet, workers: int) -> Text:
    first = next(iter(fleet.reached.values()), None)
    text = Text(no_wrap=True, overflow="ellipsis")
    if first is None:
        return text.append("no shard answers", "bold red")
    text.append(escaped(f"run {first.run_id or '–'}"), "bold")
    text.append(
        f"  {escaped(first.method) or 'no method yet'}, {first.parameters:,} parameters, "
        f"{len(fleet.reached)} of {first.num_shards} shards, {workers} workers, {first.samples:,} samples"
    )
    return text


_FIGURES = ("version", "pushes/s", "up/s", "down/s", "saved", "queue", "snapshot")


def _shard_table(fleet: Fleet, rates: dict[str, Rates], *, wide: bool) -> Table:
    """Return the table of shards; a narrow one has the address of those only that do not answer."""
    columns = [
        Column(name, itemgetter(name), name in ("address", "state"), wide=name in ("address", "snapshot"))
        for name in ("shard", "address", "state", *_FIGURES)
    ]
    return table_of(columns, (_shard_row(shard, rates.get(shard.address), wide) for shard in fleet.shards), wide=wide)


def _shard_row(shard: Outcome, rates: Rates | None, wide: bool) -> dict[str, str | Text]:
    row: dict[str, str | Text] = dict.fromkeys(_FIGURES, "–") | {"address": cell(shard.address)}
    if shard.error is not None:
        why = "refuses" if shard.error.refused else "no answer"
        return row | {"shard": "?", "state": cell(why if wide else f"{shard.address}: {why}", "bold red")}
    status = shard.answer
    row |= {
        "shard": str(status.shard_index),
        "state": cell(state_of(status), "yellow" if status.draining or not status.durable else ""),
        "version": f"{status.version:,}",
        "queue": f"{status.queued}/{status.queue_limit}",
    }
    if rates:
        row["pushes/s"] = f"{rates['pushes_per_second']:.1f}"
        row["up/s"] = human_bytes(rates["push_bytes_per_second"])
        row["down/s"] = human_bytes(rates["pull_bytes_per_second"])
    if (share := saved_share(status)) is not None:
        row["saved"] = f"{share:.1%}"
    if status.snapshot_age_seconds:
        row["snapshot"] = f"{status.snapshot_age_seconds:.0f} s ago"
    return row
