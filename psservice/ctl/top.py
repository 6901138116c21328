"""``psservice top``: the status of running shards again and again."""

import dataclasses
import os
import select
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pscore.names import escaped
from pscore.units import human_bytes
from psservice.ctl import render
from psservice.ctl.client import EXIT_DONE, Outcome, ShardClients, exit_status
from psservice.ctl.fleet import RATES, Fleet, Rates, read_fleet, saved_bytes, saved_share
from psservice.observability.protojson import plain

WIDE_COLUMNS = 110
"""Width of a terminal from which everything is shown."""

_FEWEST_WORKERS_SHOWN = 3
_TABLE_LINES = 4  # of a table, around its rows


def top(clients: ShardClients, options: Namespace) -> int:
    """Show shards and workers until q or Ctrl-C; once with ``--once``, or if stdout is no terminal.

    Rates are those between two statuses, so a single frame takes ``--interval-seconds`` too.
    """
    try:
        if options.output != "table" and not options.once:
            return _stream(clients, options.interval_seconds, options.output)
        if options.once or not sys.stdout.isatty():
            return _single(clients, options)
        return _live(clients, options.interval_seconds)
    except KeyboardInterrupt:
        return EXIT_DONE


def _single(clients: ShardClients, options: Namespace) -> int:
    before = fleet = read_fleet(clients)
    if before.reached:
        time.sleep(options.interval_seconds)
        fleet = read_fleet(clients)
    rates = fleet.rates(before)
    if options.output != "table":
        render.print_plain(frame_plain(fleet, rates), options.output, of_several=True)
    else:
        console = render.new_console()
        console.print(frame(fleet, rates, console.width))
        render.say_errors(fleet.unreached)
    return exit_status(fleet.shards)


def _stream(clients: ShardClients, interval_seconds: float, form: str) -> int:
    before = read_fleet(clients)
    while True:
        time.sleep(interval_seconds)
        fleet = read_fleet(clients)
        render.print_plain(frame_plain(fleet, fleet.rates(before)), form, of_several=True)
        before = fleet


def _live(clients: ShardClients, interval_seconds: float) -> int:
    console, before = render.new_console(), None
    with _keys() as watched, Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(Text("asking the shards …"), refresh=True)
        while before is None or not _quits(watched, interval_seconds):
            fleet = read_fleet(clients)
            columns, rows = console.size
            live.update(frame(fleet, fleet.rates(before), columns, rows), refresh=True)
            before = fleet
    return EXIT_DONE


@contextmanager
def _keys() -> Iterator[bool]:
    """Deliver single keys if stdin is a terminal; yield whether it is."""
    if not sys.stdin.isatty():
        yield False
        return
    import termios  # late: not on every system, and only here
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield True
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _quits(watched: bool, seconds: float) -> bool:
    """Wait so long; tell whether q was pressed meanwhile."""
    end = time.monotonic() + seconds
    while (remaining := end - time.monotonic()) > 0:
        if not watched:
            time.sleep(remaining)
        elif select.select([sys.stdin], [], [], remaining)[0]:
            keys = os.read(sys.stdin.fileno(), 64)
            if not keys or b"q" in keys.lower():  # no keys: the terminal is gone
                return True
    return False


def frame_plain(fleet: Fleet, rates: dict[str, Rates]) -> dict[str, Any]:
    """Return a frame for JSON: shards with their rates, and all workers."""
    shards: list[dict[str, Any]] = []
    for address, status in fleet.reached.items():
        values = plain(status)
        del values["workers"], values["evicted"]  # they follow, joined over the shards
        unknown = {f"{name}_per_second": None for name in RATES}
        shards.append({"address": address, **values, "saved_bytes": saved_bytes(status), **rates.get(address, unknown)})
    shards += [render.outcome_plain(each) for each in fleet.unreached]
    return {
        "unix_seconds": time.time(),
        "shards": shards,
        "workers": [dataclasses.asdict(worker) for worker in fleet.workers()],
        "evicted": fleet.evicted(),
    }


def frame(fleet: Fleet, rates: dict[str, Rates], columns: int, lines: int | None = None) -> RenderableType:
    """Return a frame for a terminal of so many columns and lines; ``None`` for as many lines as the frame needs."""
    workers = fleet.workers()
    below = [
        *render.standby_lines(fleet),
        *render.relay_lines(fleet),
        *render.reader_lines(fleet),
        *render.lost_lines(fleet),
        *render.release_lines(fleet),
        *render.evicted_lines(fleet),
    ]
    hidden = 0
    if lines is not None:
        below += [render.cell(str(each.error), "red") for each in fleet.unreached]
        taken = 1 + len(fleet.shards) + 2 * _TABLE_LINES + len(below) + 1  # headline, shards, workers' table, one below
        hidden = max(0, len(workers) - max(_FEWEST_WORKERS_SHOWN, lines - taken))
    if hidden:
        below.insert(0, Text(f"and {hidden} more workers: make the terminal higher, or see psservice workers", "dim"))
    wide = columns >= WIDE_COLUMNS
    visible = workers[: len(workers) - hidden]
    table = render.worker_table(visible, wide=wide) if workers else Text("no live workers", "dim")
    return Group(_headline(fleet, len(workers)), _shard_table(fleet, rates, wide=wide), table, *below)


def _headline(fleet: Fleet, workers: int) -> Text:
    first = next(iter(fleet.reached.values()), None)
    text = Text(no_wrap=True, overflow="ellipsis")
    if first is None:
        refused = any(each.error is not None and each.error.refused for each in fleet.unreached)
        return text.append("this command is refused" if refused else "no shard answers", "bold red")
    text.append(escaped(f"run {first.run_id or '–'}"), "bold")
    text.append(
        f"  {escaped(first.method) or 'no method yet'}, {first.parameters:,} parameters, "
        f"{len(fleet.reached)} of {_counted(first.num_shards, 'shard')}, {_counted(workers, 'worker')}, "
        f"{first.samples:,} samples"
    )
    return text


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


_FIGURES = ("version", "pushes/s", "up/s", "down/s", "saved", "queue", "snapshot")


def _shard_table(fleet: Fleet, rates: dict[str, Rates], *, wide: bool) -> Table:
    """Return the table of shards; a narrow one has the address of those only that do not answer."""
    columns = [
        render.Column(name, itemgetter(name), name in ("address", "state"), wide=name in ("address", "snapshot"))
        for name in ("shard", "address", "state", *_FIGURES)
    ]
    rows = [_shard_row(shard, rates.get(shard.address), wide) for shard in fleet.shards]
    return render.table_of(columns, rows, wide=wide)


def _shard_row(shard: Outcome, rates: Rates | None, wide: bool) -> dict[str, str | Text]:
    row: dict[str, str | Text] = dict.fromkeys(_FIGURES, "–") | {"address": render.cell(shard.address)}
    if shard.error is not None:
        why = "refuses" if shard.error.refused else "no answer"
        return row | {"shard": "?", "state": render.cell(why if wide else f"{shard.address}: {why}", "bold red")}
    status = shard.answer
    row |= {
        "shard": str(status.shard_index),
        "state": render.cell(render.state_of(status), "yellow" if status.draining or not status.durable else ""),
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
