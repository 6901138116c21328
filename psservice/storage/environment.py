"""Clocks, threads, randomness and files of a shard, which a simulator replaces."""

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from psservice.storage.files import DISK, Files


@dataclass(frozen=True, slots=True)
class Environment:
    """What a shard asks of the machine.

    Without threads, jobs run in the thread of their caller, who also calls ``Journal.force``,
    ``Durability.snapshot_if_due`` and ``lifecycle.end_leases`` in time.
    """

    files: Files = DISK
    monotonic: Callable[[], float] = time.monotonic
    unix_seconds: Callable[[], float] = lambda: time.time()  # found anew: verify skews the clock
    random_bytes: Callable[[int], bytes] = secrets.token_bytes
    is_threaded: bool = True

    def start(self, target: Callable[[], None], name: str) -> threading.Thread | None:
        """Start a daemon thread, or nothing if there are no threads."""
        if not self.is_threaded:
            return None
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread


MACHINE = Environment()
