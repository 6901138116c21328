"""Limits of the system on a process that runs, lowered for a while."""

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def lowered(pid: int, which: int, value: int) -> Iterator[None]:
    """Lower a limit of a process until the end of the block; it may have ended by then."""
    before = resource.prlimit(pid, which)
    resource.prlimit(pid, which, (value, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, which, before)


def next_descriptor(pid: int) -> int:
    """Return the lowest number that no open file of a process has: what it opens next gets it."""
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    return next(number for number in range(len(taken) + 1) if number not in taken)
