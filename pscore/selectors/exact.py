"""Exact top-k of |x|; ties at the threshold go to the lowest index, so the result is deterministic."""

import numpy as np
import torch


def exact(x: torch.Tensor, k: int) -> torch.Tensor:
    """Return the offsets of the ``k`` largest |x|, sorted; fewer where fewer are non-zero.

    On the host the threshold comes from a quickselect (``numpy.partition``), which is several times faster there than
    ``torch.topk``; on CUDA from ``torch.topk``.
    """
    if k <= 0:
        return torch.empty(0, dtype=torch.int64, device=x.device)
    magnitude = x.detach().abs()
    if k >= magnitude.numel():
        return magnitude.nonzero().view(-1)
    if magnitude.device.type == "cpu":
        return torch.from_numpy(_exact_on_host(magnitude.float().numpy(), k))
    offsets = torch.topk(magnitude, k, sorted=False).indices.sort().values
    return offsets[magnitude[offsets] > 0]


def _exact_on_host(magnitude: np.ndarray, k: int) -> np.ndarray:
    threshold = np.partition(magnitude, magnitude.size - k)[magnitude.size - k]
    above = np.flatnonzero(magnitude > threshold)
    missing = k - above.size
    if not missing or threshold == 0:
        return above
    ties = np.flatnonzero(magnitude == threshold)[:missing]
    return np.sort(np.concatenate([above, ties]))
