"""A wall clock that is wrong.

Its file has one float, seconds to add to what ``time.time()`` says; whoever writes the file steps the clock
of a process that runs. This shifts the wall clock as the server's own modules read it, and only there: gRPC's Python
layer adds a time-out to ``time.time()`` and has the system's clock compare, which on a machine with a wrong clock is
the same clock, and here would be two. The monotonic clock stays: no message of the protocol carries a time, and every
lease, deadline and period is measured on the monotonic clock, which steps of the wall clock do not move.
"""

import importlib
import mmap
import struct
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

_FORM = struct.Struct("<d")
_OURS = ("psservice", "pscore")


class SkewedClock:
    """Says the time, wrongly."""

    def __init__(self, path: Path, real: Callable[[], float] = time.time) -> None:
        """Read the error from a file, each time anew."""
        with path.open("rb") as file:
            self._error = mmap.mmap(file.fileno(), _FORM.size, access=mmap.ACCESS_READ)
        self._real = real

    def __call__(self) -> float:
        """Return seconds since the epoch, shifted, and never before it."""
        return max(0.0, self._real() + float(_FORM.unpack(self._error[: _FORM.size])[0]))


def set_error(path: Path, seconds: float) -> None:
    """Step the clock of whoever reads this file."""
    if not path.exists():
        path.write_bytes(_FORM.pack(seconds))
        return
    with path.open("r+b") as file:
        file.write(_FORM.pack(seconds))


def modules_with_a_clock() -> list[str]:
    """Return the server's modules that read any clock."""
    importlib.import_module("psservice.process.server")
    return [
        name
        for name, module in list(sys.modules.items())
        if name.split(".")[0] in _OURS and getattr(module, "time", None) is time
    ]


def shifted_time(clock: Callable[[], float]) -> types.ModuleType:
    """Return a module like ``time`` whose wall clock is this one."""
    shifted = types.ModuleType("time")
    shifted.__dict__.update(time.__dict__)
    shifted.__dict__["time"] = clock
    return shifted


def install(path: Path) -> None:
    """Replace the clock of the server's modules in this process by one that reads its error from a file."""
    shifted = shifted_time(SkewedClock(path))
    for name in modules_with_a_clock():
        sys.modules[name].__dict__["time"] = shifted
