"""Processes that begin as forks of one that has loaded everything: for campaigns that start hundreds of them."""

import multiprocessing.util
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests import forkserver


@contextmanager
def forked_processes() -> Iterator[None]:
    """Have Python processes that are started until the end of the block be forked (:mod:`tests.forkserver`).

    They are processes all the same, with their own files and session. Inside of a test this is so already.
    """
    execute, spawn = subprocess.Popen, multiprocessing.util.spawnv_passfds
    if sys.platform == "linux" and execute is not forkserver.Popen:
        forkserver.fork_from_here(setattr)
    try:
        yield
    finally:
        subprocess.Popen = execute  # type: ignore[misc]
        multiprocessing.util.spawnv_passfds = spawn
