"""``psservice`` with a wall clock that is wrong: ``python -m chaos.skewed CLOCK serve …``.

``CLOCK`` is a file of one float, seconds to add to what ``time.time()`` says; whoever writes the file steps the clock
of a process that runs. This shifts the wall clock as the server's own modules read it, and only there: gRPC's Python
layer adds a time-out to ``time.time()`` and has the system's clock compare, which on a machine with a wrong clock is
the same clock, and here would be two. The monotonic clock stays: no message of the protocol carries a time, and every
lease, deadline and period is measured on the monotonic clock, which steps of the wall clock do not move.
"""

import faulthandler
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


def install(clock: Callable[[], float]) -> list[str]:
    """Let the server's modules read this clock; return which do."""
    importlib.import_module("psservice.server")
    skewed = types.ModuleType("time")
    skewed.__dict__.update(time.__dict__)
    skewed.__dict__["time"] = clock
    changed = []
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in _OURS and getattr(module, "time", None) is time:
            module.__dict__["time"] = skewed
            changed.append(name)
    return changed


def main() -> int:
    """Replace the clock, then become the server; where it hangs, SIGABRT shows at what."""
    faulthandler.enable()
    install(SkewedClock(Path(sys.argv[1])))
    from psservice.cli import main as serve

    return serve(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
