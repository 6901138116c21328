"""Compiled loops over ranges, one for each thread that torch is set to use.

Results do not depend on the number of threads: ranges are joined in order. The threads are our own, because the
compiler's may not be entered from two threads at once.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

Result = TypeVar("Result")

_SMALLEST_RANGE = 1 << 17  # elements; below it a thread costs more than it saves


def parts_of(size: int) -> int:
    """Return into how many ranges so many elements are best cut."""
    return max(1, min(torch.get_num_threads(), size // _SMALLEST_RANGE))


def in_parallel(ranges: Sequence[slice], loop: Callable[[slice], Result]) -> list[Result]:
    """Run ``loop`` on each range, the first in this thread; return the results in order."""
    if len(ranges) == 1:
        return [loop(ranges[0])]
    try:
        others = [_pool(os.getpid()).submit(loop, each) for each in ranges[1:]]
    except RuntimeError:  # the interpreter is ending, and starts no thread any more
        return [loop(each) for each in ranges]
    first = loop(ranges[0])
    return [first, *(other.result() for other in others)]


@cache
def _pool(_process: int) -> ThreadPoolExecutor:
    """One pool a process: threads do not survive a fork."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kernels")
