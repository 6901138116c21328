"""The kernels on host memory: compiled loops, cut over the cores.

The result does not depend on the number of threads: ranges are joined in order, and no sum decides what is taken.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pscore.select.kernels.base import GradientUpdate, Taken, ThresholdResult
from pscore.select.kernels.threads import over_ranges

Array = NDArray[np.float32]


def available() -> bool:
    """Tell whether the loops can be compiled here."""
    return _loops().take is not None


def _loops() -> Any:
    """Import the loops, and numba with them."""
    from pscore.select.kernels import cpu_loops

    return cpu_loops


def feed(memory: torch.Tensor, added: GradientUpdate) -> None:
    """Accumulate: see :class:`~pscore.select.kernels.base.GradientUpdate`."""
    cpu_loops = _loops()
    arrays = _arrays(memory, added)
    factors = _factors(added)

    def loop(part: slice) -> None:
        cpu_loops.feed(*(None if array is None else array[part] for array in arrays), *factors)

    over_ranges(memory.numel(), loop)


def take(
    memory: torch.Tensor, added: GradientUpdate | None, threshold: float, keep: float, capacity: int
) -> ThresholdResult:
    """Accumulate, take out what is above the threshold, and leave ``keep`` of it behind, in one pass.

    Args:
        memory: fp32 ``[n]``, changed in place.
        added: what is accumulated first; ``None`` for nothing.
        threshold: entries with a greater magnitude are taken.
        keep: what a taken entry is multiplied by where it was.
        capacity: take at most so many, the first ones; the rest is counted and stays.
    """
    cpu_loops = _loops()
    arrays = _arrays(memory, added)
    factors = _factors(added)

    def loop(part: slice) -> _Part:
        room = min(capacity, part.stop - part.start)
        offsets, values = np.empty(room, np.int64), np.empty(room, np.float32)
        count, excess = cpu_loops.take(
            *(None if array is None else array[part] for array in arrays),
            *factors,
            np.float32(threshold),
            np.float32(keep),
            offsets,
            values,
        )
        return part.start, offsets, values, count, excess

    sift = _join(over_ranges(memory.numel(), loop))
    surplus = sift.taken.offsets.numel() - capacity
    if surplus > 0:  # each range had room for all
        offsets, values = sift.taken
        memory[offsets[capacity:]] = values[capacity:]
        sift = sift._replace(taken=Taken(offsets[:capacity], values[:capacity]))
    return sift


def take_difference(a: torch.Tensor, b: torch.Tensor, threshold: float, capacity: int) -> ThresholdResult:
    """Copy out ``a − b`` where its magnitude is above the threshold; neither is changed. Both fp32 ``[n]``."""
    cpu_loops = _loops()
    left, right = a.numpy(), b.numpy()

    def loop(part: slice) -> _Part:
        room = min(capacity, part.stop - part.start)
        offsets, values = np.empty(room, np.int64), np.empty(room, np.float32)
        count, excess = cpu_loops.take_difference(left[part], right[part], np.float32(threshold), offsets, values)
        return part.start, offsets, values, count, excess

    sift = _join(over_ranges(a.numel(), loop))
    return sift._replace(taken=Taken(sift.taken.offsets[:capacity], sift.taken.values[:capacity]))


def tail(x: torch.Tensor, threshold: float) -> tuple[int, float]:
    """Count the magnitudes above the threshold, and sum what they exceed it by."""
    cpu_loops = _loops()
    array = x.numpy()
    parts = over_ranges(x.numel(), lambda part: cpu_loops.tail(array[part], np.float32(threshold)))
    return sum(count for count, _ in parts), sum(excess for _, excess in parts)


def magnitude(x: torch.Tensor) -> tuple[float, float]:
    """Return mean and largest of ``|x|``; ``(0, 0)`` of nothing."""
    cpu_loops = _loops()
    array = x.numpy()
    parts = over_ranges(x.numel(), lambda part: cpu_loops.magnitude(array[part]))
    return sum(total for total, _ in parts) / max(1, x.numel()), float(max(largest for _, largest in parts))


def subtract_at(x: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> None:
    """``x[offsets] −= values``; on one thread, because memory is what it waits for."""
    _loops().subtract_at(x.numpy(), offsets.numpy(), values.numpy())


def exceeding(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, ends: NDArray[np.int64], bounds: Array
) -> torch.Tensor:
    """Return those of ``offsets`` (ascending) where ``|a − b|`` exceeds the bound of its tensor, as int64.

    Args:
        a: fp32 ``[n]``.
        b: likewise.
        offsets: int32 or int64, ascending.
        ends: where each tensor ends, ascending; the last is ``n``.
        bounds: one for each tensor.
    """
    found = np.empty(offsets.numel(), np.int64)
    count = _loops().exceeding(a.numpy(), b.numpy(), offsets.numpy(), ends, bounds, found)
    return torch.from_numpy(found[:count].copy())


_Part = tuple[int, NDArray[np.int64], Array, int, float]


def _arrays(
    memory: torch.Tensor, added: GradientUpdate | None
) -> tuple[Array, Array | None, Array | None, Array | None]:
    """Return ``r, g, θ, u`` as the loops take them."""
    if added is None:
        return memory.numpy(), None, None, None
    parameters = added.parameters if added.decay else None
    return (
        memory.numpy(),
        added.gradient.detach().float().numpy(),
        None if parameters is None else parameters.detach().float().numpy(),
        None if added.momentum is None else added.momentum.numpy(),
    )


def _factors(added: GradientUpdate | None) -> tuple[np.float32, np.float32, np.float32]:
    if added is None:
        return np.float32(0), np.float32(0), np.float32(0)
    return np.float32(added.scale), np.float32(added.decay), np.float32(added.factor)


def _join(parts: Sequence[_Part]) -> ThresholdResult:
    filled = [(start, min(count, offsets.size)) for start, offsets, _, count, _ in parts]
    if len(parts) == 1:
        (_, offsets, values, _, _), (_, size) = parts[0], filled[0]
        joined = Taken(torch.from_numpy(offsets[:size].copy()), torch.from_numpy(values[:size].copy()))
    else:
        offsets = np.concatenate([part[1][:size] + start for part, (start, size) in zip(parts, filled, strict=True)])
        values = np.concatenate([part[2][:size] for part, (_, size) in zip(parts, filled, strict=True)])
        joined = Taken(torch.from_numpy(offsets), torch.from_numpy(values))
    return ThresholdResult(joined, sum(part[3] for part in parts), sum(part[4] for part in parts))
