"""``psservice top``: looking at running shards again and again."""

import json
import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.live import Live
from rich.text import Text

from psservice.operator.client import EXIT_DONE, Lines, Outcome, exit_status
from psservice.operator.fleet import Look, look
from psservice.operator.render import new_console
from psservice.operator.top_view import frame, frame_plain


def top(lines: Lines, *, as_json: bool, once: bool, interval_seconds: float) -> int:
    """Show shards and workers until q or Ctrl-C; once where that is asked for, or where stdout is no terminal.

    Rates are those between two looks, ``interval_seconds`` apart, so a single frame takes that long too.

    Returns:
        The exit status: of a single frame as for ``status``, else 0.
    """
    try:
        if as_json and not once:
            return _stream(lines, interval_seconds)
        if once or not sys.stdout.isatty():
            return _single(lines, interval_seconds, as_json=as_json)
        return _live(lines, interval_seconds)
    except KeyboardInterrupt:
        return EXIT_DONE


def _single(lines: Lines, interval_seconds: float, *, as_json: bool) -> int:
    before = look(lines)
    if before.reached:
        time.sleep(interval_seconds)
    found = look(lines) if before.reached else before
    rates = found.rates(before)
    if as_json:
        print(json.dumps(frame_plain(found, rates)))
    else:
        console = new_console()
        console.print(frame(found, rates, console.width))
    return exit_status([Outcome(shard.address, shard.status, shard.error) for shard in found.shards])


def _stream(lines: Lines, interval_seconds: float) -> int:
    before = look(lines)
    while True:
        time.sleep(interval_seconds)
        found = look(lines)
        print(json.dumps(frame_plain(found, found.rates(before))), flush=True)
        before = found


def _live(lines: Lines, interval_seconds: float) -> int:
    console = new_console()
    before: Look | None = None
    with _keys() as watched, Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(Text("asking the shards …"), refresh=True)
        while True:
            found = look(lines)
            columns, rows = console.size
            live.update(frame(found, found.rates(before), columns, rows), refresh=True)
            before = found
            if _quits(watched, interval_seconds):
                return EXIT_DONE


@contextmanager
def _keys() -> Iterator[bool]:
    """Let single keys through, where stdin is a terminal; yield whether it is."""
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
            if not keys or b"q" in keys.lower():  # nothing: the terminal is gone
                return True
    return False
