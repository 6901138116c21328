"""The selection kernels in plain torch operations, on any device, and of numpy if these are faster on the host.

They define the bits of the fast kernels, serve small tensors, and stand in if Triton is missing. Every product and
every sum is rounded by itself (no fused multiply-add), so that all backends agree.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from pscore.selection.kernels.base import GradientUpdate, Taken, ThresholdResult, is_large


def accumulate(memory: torch.Tensor, added: GradientUpdate) -> None:
    """Add ``added`` to ``memory``, in place, and bring its momentum up to date."""
    step = added.gradient.float() * added.scale
    if added.parameters is not None:
        step = step + added.parameters.float() * added.decay
    if added.momentum is not None:
        step = added.momentum.mul_(added.factor).add_(step)
    memory.add_(step)


def take(
    memory: torch.Tensor, added: GradientUpdate | None, threshold: float, keep: float, capacity: int
) -> ThresholdResult:
    """Accumulate, take out the first ``capacity`` entries above the threshold, leave ``keep·value`` behind."""
    if added is not None:
        accumulate(memory, added)
    result = copy_above(memory, threshold, capacity)
    put(memory, result.taken.offsets, result.taken.values * keep)
    return result


def put(x: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> None:
    """``x[offsets] = values``; on the host by numpy, whose calls cost a fraction of torch's on few elements."""
    if x.is_cpu:
        x.numpy()[offsets.numpy()] = values.numpy()
    else:
        x[offsets] = values


def copy_above(x: torch.Tensor, threshold: float, capacity: int) -> ThresholdResult:
    """Copy the first ``capacity`` entries above the threshold."""
    if x.is_cpu:
        return _copy_above_on_host(x.numpy(), np.float32(threshold), capacity)
    magnitudes = x.abs()
    above = (~(magnitudes <= threshold)).nonzero().view(-1)
    excess = float((magnitudes[above] - threshold).sum(dtype=torch.float64))
    offsets = above[:capacity]
    return ThresholdResult(Taken(offsets, x[offsets]), above.numel(), excess)


def _copy_above_on_host(x: NDArray[np.float32], threshold: np.float32, capacity: int) -> ThresholdResult:
    magnitudes = np.abs(x)
    above = np.flatnonzero(~(magnitudes <= threshold))
    excess = float((magnitudes[above] - threshold).sum(dtype=np.float64))
    offsets = above[:capacity]
    return ThresholdResult(Taken(torch.from_numpy(offsets), torch.from_numpy(x[offsets])), above.size, excess)


def magnitude(x: torch.Tensor) -> tuple[float, float]:
    """Return sum and largest of |x|; zeros for an empty tensor."""
    absolute = x.abs()
    return float(absolute.sum(dtype=torch.float64)), float(absolute.max()) if x.numel() else 0.0


def subtract_at(x: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> bool:
    """``x[offsets] −= values``, if fp32 has the results."""
    left = x[offsets] - values
    if is_large(values) and not bool(left.isfinite().all()):
        return False
    x[offsets] = left  # and no sum by atomics, which on CUDA flush subnormal numbers
    return True
