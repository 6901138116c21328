"""Servers that are killed and started again, or stand still for a moment."""

import os
import signal
import threading
import time
from collections.abc import Sequence

from verify.cluster.servers import Servers
from verify.plan import Result


def kill_and_start(servers: Servers, result: Result, chosen: Sequence[int], again_after: float | None = None) -> None:
    """Kill shards and start them again; the first once more after some seconds, where it still recovers or not.

    All serve again when this returns. The result has the kills, and the seconds until then.
    """
    for shard in chosen:
        servers.kill(shard)
        result.faults["servers killed"] += 1
    started = time.monotonic()
    for shard in chosen:
        servers.start(shard)
    if again_after is not None:
        threading.Event().wait(again_after)
        servers.kill(chosen[0])
        result.faults["servers killed"] += 1
        result.faults["of these, while they recovered"] += 1
        servers.start(chosen[0])
    for shard in chosen:
        servers.await_ready(shard)
    result.recovery_seconds.append(time.monotonic() - started)


def stall(servers: Servers, result: Result, shard: int, seconds: float) -> None:
    """Let a server stand still for a moment."""
    result.faults["servers stopped"] += 1
    os.kill(servers.pid(shard), signal.SIGSTOP)
    threading.Event().wait(seconds)
    os.kill(servers.pid(shard), signal.SIGCONT)
