"""Bytes that a process has received and sent over TCP, by the counters that the kernel keeps for each of its sockets.

Payload of TCP: all that a protocol sends, its own framing included, without TCP and IP headers. The counters belong to
the sockets, so other traffic on the same interface does not matter; sockets must still be open when they are read.
"""

import re
import shutil
import subprocess
from typing import NamedTuple


class Traffic(NamedTuple):
    """Bytes of a process."""

    received: int
    sent: int

    def since(self, earlier: "Traffic") -> "Traffic":
        """Return what came after."""
        return Traffic(self.received - earlier.received, self.sent - earlier.sent)


def available() -> bool:
    """Tell whether the counters can be read: ``ss`` of iproute2."""
    return shutil.which("ss") is not None


def of_process(pid: int) -> Traffic:
    """Read the counters of all connected sockets of a process."""
    answer = subprocess.run(["ss", "-tinpHO", "state", "connected"], capture_output=True, text=True, check=True)
    lines = [line for line in answer.stdout.splitlines() if f"pid={pid}," in line]
    return Traffic(_sum("bytes_received", lines), _sum("bytes_acked", lines))


def _sum(counter: str, lines: list[str]) -> int:
    found = (re.search(rf"\b{counter}:(\d+)", line) for line in lines)
    return sum(int(match[1]) for match in found if match)
