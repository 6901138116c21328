"""``psservice top``: the status of running shards again and again."""

import json
import os
import select
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from rich.live import Live
from rich.text import Text

from psservice.operator.client import EXIT_DONE, ShardClients, exit_status
from psservice.operator.fleet import Fleet, read_fleet
from psservice.operator.render import new_console
from psservice.operator.top_view import frame, frame_plain


def top(clients: ShardClients, options: Namespace) -> int:
    """Show shards and workers until q or Ctrl-C; once with ``--once``, or where stdout is no terminal.

    Rates are those between two statuses, so a single frame takes ``--interval-seconds`` too.

    Returns:
        The exit status: of a single frame as for ``status``, else 0.
    """
    try:
        if options.json and not options.once:
            return _stream(clients, options.interval_seconds)
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
    if options.json:
        print(json.dumps(frame_plain(fleet, rates)))
    else:
        console = new_console()
        console.print(frame(fleet, rates, console.width))
    return exit_status(fleet.shards)


def _stream(clients: ShardClients, interval_seconds: float) -> int:
    before = read_fleet(clients)
    while True:
        time.sleep(interval_seconds)
        fleet = read_fleet(clients)
        print(json.dumps(frame_plain(fleet, fleet.rates(before))), flush=True)
        before = fleet


def _live(clients: ShardClients, interval_seconds: float) -> int:
    console = new_console()
    before: Fleet | None = None
    with _keys() as watched, Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(Text("asking the shards …"), refresh=True)
        while True:
            fleet = read_fleet(clients)
            columns, rows = console.size
            live.update(frame(fleet, fleet.rates(before), columns, rows), refresh=True)
            before = fleet
            if _quits(watched, interval_seconds):
                return EXIT_DONE


@contextmanager
def _keys() -> Iterator[bool]:
    """Deliver single keys where stdin is a terminal; yield whether it is."""
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
