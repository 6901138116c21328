"""Maintenance beside serving: compile loops that are worth it, and return freed memory to the system."""

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable

from pscore import jit
from pscore.malloc import trimming
from psservice.warmup import warm_up

log = logging.getLogger("psservice")

TRIM_SECONDS = 3.0
_POLL_SECONDS = 0.25  # until the loops are compiled
_WORTH_COMPILING = 65_536
_MANY_ENTRIES = 1 << 18  # that Python has run loops over: many workers of a small model; about 0.3 s of CPU
_MALLOC_OPTIONS = {"MALLOC_TRIM_THRESHOLD_": (-1, 64 << 20), "MALLOC_MMAP_THRESHOLD_": (-3, 32 << 20)}
"""glibc's options by the environment variable of each: the number in malloc.h, bytes."""


class MaintenanceThread:
    """A thread that starts at once; ``size`` returns the number of elements of the model, 0 until it is uploaded.

    It compiles the loops of a large model before the first push. Compiling earlier would slow the upload, and the first
    push comes a gradient later. Those of a small model it compiles if they have run as Python for long.
    """

    def __init__(self, size: Callable[[], int]) -> None:
        self._size = size
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="maintenance", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, once it has compiled the loops that it is at."""
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        _keep_freed_memory()
        # Without trimming a server's resident set would grow with the number of workers. A fixed M_MMAP_THRESHOLD of
        # 128 KiB returns the memory too, but 16 threads that allocated tensors of 2 to 800 KB then took 1.7 to 2.2
        # times the CPU time.
        trim, trimmed, compiled = trimming(), time.monotonic(), False
        while not self._stop.wait(TRIM_SECONDS if compiled else _POLL_SECONDS):
            if not compiled and (self._size() >= _WORTH_COMPILING or jit.run_as_python() > _MANY_ENTRIES):
                compiled = True
                try:
                    warm_up(self._stop.is_set)
                except Exception:  # the first push meets the same error, and answers with it
                    log.exception("the loops could not be compiled ahead")
            if trim is not None and time.monotonic() - trimmed >= TRIM_SECONDS:
                trim()
                trimmed = time.monotonic()


def _keep_freed_memory() -> None:
    """Let malloc use the memory of one message of megabytes for the next, and not pages that the system clears.

    Receiving messages of 1 to 2 MiB by gRPC then took 0.6 to 0.8 times the CPU time. Options of the environment win.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return  # musl
    if not _MALLOC_OPTIONS.keys() & os.environ.keys():
        for option, nbytes in _MALLOC_OPTIONS.values():
            mallopt(option, nbytes)
