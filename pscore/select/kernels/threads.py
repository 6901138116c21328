"""Cutting a loop over the cores: as many threads as torch is set to use, each with one contiguous range.

Threads of our own, because the compiler's may not be entered from two threads at once, and a server's are.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import TypeVar

import torch

Result = TypeVar("Result")

_SMALLEST_RANGE = 1 << 17  # elements; below it a thread costs more than it saves


def over_ranges(size: int, loop: Callable[[slice], Result]) -> list[Result]:
    """Run ``loop`` on ranges that make up ``[0, size)``, in parallel; return the results in order."""
    parts = max(1, min(torch.get_num_threads(), size // _SMALLEST_RANGE))
    cuts = [size * part // parts for part in range(parts + 1)]
    ranges = [slice(low, high) for low, high in pairwise(cuts)]
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
