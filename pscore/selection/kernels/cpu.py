"""The kernels on host memory: compiled loops over ranges, one for each thread that torch is set to use.

The result does not depend on the number of threads: ranges are joined in order, and no sum decides what is taken. The
threads are our own, because the compiler's may not be entered from two threads at once, and a server's are.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from pscore.selection.kernels import cpu_loops
from pscore.selection.kernels.base import LARGE, GradientUpdate, Taken, ThresholdResult

Array = NDArray[np.float32]
Result = TypeVar("Result")

_SMALLEST_RANGE = 1 << 17  # elements; below it a thread costs more than it saves


def take(
    memory: torch.Tensor, added: GradientUpdate | None, threshold: float, keep: float, capacity: int
) -> ThresholdResult:
    """Accumulate, take out the first ``capacity`` entries above the threshold, and leave ``keep`` times them behind."""
    result = _sift(memory, added, threshold, keep, capacity)
    offsets, values = result.taken
    if offsets.numel() > capacity:  # each range had room for all
        memory[offsets[capacity:]] = values[capacity:]
    return result._replace(taken=Taken(offsets[:capacity], values[:capacity]))


def copy_above(x: torch.Tensor, threshold: float, capacity: int) -> ThresholdResult:
    """Copy the first ``capacity`` entries above the threshold."""
    result = _sift(x, None, threshold, 1.0, capacity)
    return result._replace(taken=Taken(result.taken.offsets[:capacity], result.taken.values[:capacity]))


def magnitude(x: torch.Tensor) -> tuple[float, float]:
    """Return sum and largest of ``|x|``."""
    array = x.numpy()
    parts = _over_ranges(x.numel(), lambda part: cpu_loops.magnitude(array[part]))
    return sum(total for total, _ in parts), float(max(largest for _, largest in parts))


def subtract_at(x: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> bool:
    """``x[offsets] −= values``, if fp32 has the results; on one thread, because memory is the limit."""
    return bool(cpu_loops.subtract_at(x.numpy(), offsets.numpy(), values.numpy(), np.float32(LARGE)))


def _sift(
    x: torch.Tensor, added: GradientUpdate | None, threshold: float, keep: float, capacity: int
) -> ThresholdResult:
    """Run the loop over all ranges; each may take as many as ``capacity``. ``x`` changes unless ``keep`` is 1."""
    gradient = parameters = momentum = None
    factors = np.zeros(3, np.float32)
    if added is not None:
        gradient, momentum = added.gradient.detach().float(), added.momentum
        if added.decay and added.parameters is not None:
            parameters = added.parameters.detach().float()
        factors[:] = added.scale, added.decay, added.factor
    arrays = [None if each is None else each.numpy() for each in (x, gradient, parameters, momentum)]

    def loop(part: slice) -> tuple[NDArray[np.int64], Array, int, float]:
        room = min(capacity, part.stop - part.start)
        offsets, values = np.empty(room, np.int64), np.empty(room, np.float32)
        views = (None if array is None else array[part] for array in arrays)
        arguments = (*views, *factors, np.float32(threshold), np.float32(keep), offsets, values)
        count, excess = cpu_loops.take(*arguments)
        size = min(count, room)
        return offsets[:size] + part.start, values[:size], count, excess

    offsets, values, counts, excesses = zip(*_over_ranges(x.numel(), loop), strict=True)
    taken = Taken(torch.from_numpy(np.concatenate(offsets)), torch.from_numpy(np.concatenate(values)))
    return ThresholdResult(taken, sum(counts), sum(excesses))


def _over_ranges(size: int, loop: Callable[[slice], Result]) -> list[Result]:
    """Run ``loop`` on ranges that make up ``[0, size)``, in parallel; return the results in order."""
    parts = parts_of(size)
    return in_parallel(
        [slice(low, high) for low, high in pairwise(size * part // parts for part in range(parts + 1))], loop
    )


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
