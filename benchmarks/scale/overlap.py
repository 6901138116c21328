"""How much of what one push names another has named already: real training, several workers, one model.

Workers take turns, each with batches and residuals of its own, as asynchronous workers of the same speed do.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from benchmarks.peers.task import batches
from benchmarks.workload.captured import Residuals, Run, convnet, push
from pscore.selection import DEFAULT_SELECTOR, SELECTORS

WINDOWS = (2, 4, 8, 16)
_RATE, _DENSE_BELOW, _WARM = 0.05, 4096, 0.5


def supports(workers: int, density: float, steps: int, seed: int) -> tuple[list[np.ndarray], int]:
    """Train; return what each push named in the order of pushes, and how many elements there are."""
    model = convnet(seed)
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    starts = np.cumsum([0, *(size for size in sizes if size >= _DENSE_BELOW)])
    states: list[Residuals] = [{} for _ in range(workers)]
    draws = [batches(seed + worker) for worker in range(workers)]
    found, run = [], Run()
    for step in range(steps):
        for state, draw in zip(states, draws, strict=True):
            x, y = next(draw)
            model.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
            sent = push(parameters, state, _RATE, density, SELECTORS[DEFAULT_SELECTOR], run)
            if step >= _WARM * steps:
                large = [where for (where, _), size in zip(sent, sizes, strict=True) if size >= _DENSE_BELOW]
                named = [where.numpy() + start for where, start in zip(large, starts, strict=False)]
                found.append(np.concatenate(named))
    return found, int(starts[-1])


def novelty(found: Sequence[np.ndarray], size: int) -> float:
    """Return ``a`` such that ``n`` pushes in a row change what ``n^a`` pushes at random places would.

    Args:
        found: what each push named, in order.
        size: elements that there are.
    """
    density = sum(named.size for named in found) / len(found) / size
    logarithms = []
    for window in WINDOWS:
        unions = [
            np.unique(np.concatenate(found[first : first + window])).size / size
            for first in range(0, len(found) - window + 1, window)
        ]
        if unions:
            pushes = math.log1p(-min(0.999, sum(unions) / len(unions))) / math.log1p(-density)
            logarithms.append((math.log(window), math.log(max(1.0, pushes))))
    above = sum(x * y for x, y in logarithms)
    return min(1.0, above / sum(x * x for x, _ in logarithms))


def measure(densities: Sequence[float], steps: int, seed: int) -> dict[float, float]:
    """Return the novelty by density, of eight workers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {density: novelty(*supports(8, density, steps, seed)) for density in densities}
    finally:
        torch.set_num_threads(threads)
