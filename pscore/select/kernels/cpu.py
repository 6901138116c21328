"""The kernels on host memory: compiled loops over ranges, one for each thread that torch is set to use.

The result does not depend on the number of threads: ranges are joined in order, and no sum decides what is taken. The
threads are our own, because the compiler's may not be entered from two threads at once, and a server's are.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from pscore.select.kernels import cpu_loops
from pscore.select.kernels.base import GradientUpdate, Taken, ThresholdResult

Array = NDArray[np.float32]
Result = TypeVar("Result")

_SMALLEST_RANGE = 1 << 17  # elements; below it a thread costs more than it saves


def accumulate(memory: torch.Tensor, added: GradientUpdate) -> None:
    """Add ``added`` to ``memory``, in place."""
    take(memory, added, np.inf, 0.0, 0)


def take(
    memory: torch.Tensor, added: GradientUpdate | None, threshold: float, keep: float, capacity: int
) -> ThresholdResult:
    """Accumulate, take out the first ``capacity`` entries above the threshold, and leave ``keep`` times them behind."""
    arrays: list[Array | None] = [memory.numpy(), None, None, None, None]
    factors = np.zeros(3, np.float32)
    if added is not None:
        arrays[2] = added.gradient.detach().float().numpy()
        if added.decay and added.parameters is not None:
            arrays[3] = added.parameters.detach().float().numpy()
        if added.momentum is not None:
            arrays[4] = added.momentum.numpy()
        factors[:] = added.scale, added.decay, added.factor
    result = _sift(arrays, factors, threshold, keep, capacity)
    offsets, values = result.taken
    if offsets.numel() > capacity:  # each range had room for all
        memory[offsets[capacity:]] = values[capacity:]
    return result._replace(taken=Taken(offsets[:capacity], values[:capacity]))


def take_difference(a: torch.Tensor, b: torch.Tensor, threshold: float, capacity: int) -> ThresholdResult:
    """Copy the first ``capacity`` entries of ``a − b`` above the threshold."""
    result = _sift([a.numpy(), b.numpy(), None, None, None], np.zeros(3, np.float32), threshold, 0.0, capacity)
    return result._replace(taken=Taken(result.taken.offsets[:capacity], result.taken.values[:capacity]))


def count_above(x: torch.Tensor, threshold: float) -> tuple[int, float]:
    """Count the magnitudes above the threshold, and sum what they exceed it by."""
    result = _sift([x.numpy(), None, None, None, None], np.zeros(3, np.float32), threshold, 0.0, 0)
    return result.count_above, result.sum_above


def magnitude(x: torch.Tensor) -> tuple[float, float]:
    """Return sum and largest of ``|x|``."""
    array = x.numpy()
    parts = _over_ranges(x.numel(), lambda part: cpu_loops.magnitude(array[part]))
    return sum(total for total, _ in parts), float(max(largest for _, largest in parts))


def subtract_at(x: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> None:
    """``x[offsets] −= values``; on one thread, because memory is the limit."""
    cpu_loops.subtract_at(x.numpy(), offsets.numpy(), values.numpy())


def exceeding(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, ends: NDArray[np.int64], bounds: Array
) -> torch.Tensor:
    """See :class:`~pscore.select.kernels.base.Kernels`."""
    found = np.empty(offsets.numel(), np.int64)
    count = cpu_loops.exceeding(a.numpy(), b.numpy(), offsets.numpy(), ends, bounds, found)
    return torch.from_numpy(found[:count].copy())


class _Part(NamedTuple):
    """The entries of one range: offsets from the start of the tensor, values, and the two sums."""

    offsets: NDArray[np.int64]
    values: Array
    count_above: int
    sum_above: float


def _sift(arrays: list[Array | None], factors: Array, threshold: float, keep: float, capacity: int) -> ThresholdResult:
    """Run the loop over all ranges; each may take as many as ``capacity``."""

    def loop(part: slice) -> _Part:
        room = min(capacity, part.stop - part.start)
        offsets, values = np.empty(room, np.int64), np.empty(room, np.float32)
        views = (None if array is None else array[part] for array in arrays)
        arguments = (*views, *factors, np.float32(threshold), np.float32(keep), offsets, values)
        count, excess = cpu_loops.take(*arguments)
        size = min(count, room)
        return _Part(offsets[:size] + part.start, values[:size], count, excess)

    assert arrays[0] is not None
    parts = _over_ranges(arrays[0].size, loop)
    offsets, values = np.concatenate([part.offsets for part in parts]), np.concatenate([part.values for part in parts])
    taken = Taken(torch.from_numpy(offsets), torch.from_numpy(values))
    return ThresholdResult(taken, sum(part.count_above for part in parts), sum(part.sum_above for part in parts))


def _over_ranges(size: int, loop: Callable[[slice], Result]) -> list[Result]:
    """Run ``loop`` on ranges that make up ``[0, size)``, in parallel; return the results in order."""
    parts = max(1, min(torch.get_num_threads(), size // _SMALLEST_RANGE))
    ranges = [slice(low, high) for low, high in pairwise(size * part // parts for part in range(parts + 1))]
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
