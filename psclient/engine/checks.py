"""Collecting gradients, and refusing them where one is not finite, or where other workers push the same."""

import gc
from collections.abc import Container, Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from psclient.errors import ConfigurationError, NonFiniteGradientError
from psclient.model.module import TrainedModel
from pscore.select.kernels import COMPILED_FROM
from pscore.select.kernels.segments import KINDS, first_not_finite

Gradients = Mapping[int, torch.Tensor]
"""By position in the layout, in their parameters' shapes and dtypes."""


def gather(model: TrainedModel, trained: Container[torch.Tensor], positions: Iterable[int]) -> dict[int, torch.Tensor]:
    """Return the gradients of the trained parameters at these positions, as they are; costs nothing."""
    parameters = model.parameters
    found = {n: g for n in positions if (g := parameters[n].grad) is not None and parameters[n] in trained}
    return {n: g for n, g in found.items() if g.numel()}


def finite(model: TrainedModel, gradients: Gradients) -> dict[int, torch.Tensor]:
    """Return the gradients dense; :class:`NonFiniteGradientError` names the first parameter where one is not finite."""
    dense = dict(gradients)
    for position in [n for n, g in gradients.items() if g.is_sparse]:
        dense[position] = gradients[position].coalesce().to_dense()
    plain: Gradients = {}
    if model.layout.size >= COMPILED_FROM:
        plain = {n: g for n, g in dense.items() if g.is_cpu and g.is_contiguous() and g.dtype in KINDS}
    others = {n: dense[n] for n in dense.keys() - plain.keys()}
    found = [n for n in (_first_of_plain(plain), _first_of_any(others)) if n is not None]
    if found:
        raise NonFiniteGradientError(model.layout.parameters[min(found)].name)
    return dense


def _first_of_plain(gradients: Gradients) -> int | None:
    """Return the position of the first one that is not finite, of gradients on the host; in one compiled call."""
    if not gradients:
        return None
    tensors = gradients.values()
    addresses = np.array([gradient.data_ptr() for gradient in tensors])
    kinds = np.array([KINDS[gradient.dtype] for gradient in tensors], np.int8)
    row = first_not_finite(addresses, kinds, np.array([gradient.numel() for gradient in tensors]))
    return None if row is None else list(gradients)[row]


def _first_of_any(gradients: Gradients) -> int | None:
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients.values()]
    # The norms are the fast test; one may overflow although every element is finite, so only elements convict.
    if norms and not bool(torch.stack([norm.to(norms[0].device) for norm in norms]).isfinite().all()):
        return next((n for n, gradient in sorted(gradients.items()) if not bool(gradient.isfinite().all())), None)
    return None


def refuse_averaged(parameters: Iterable[torch.Tensor], among: Iterable[Any] | None = None) -> None:
    """Raise :class:`ConfigurationError` where ``DistributedDataParallel`` averages the gradients of these parameters.

    Without modules to search (``among``) all live objects are searched, which is slow: such a module leaves no mark on
    its parameters.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    from torch.nn.parallel import DistributedDataParallel

    ours = {id(parameter) for parameter in parameters}
    if among is None:
        gc.collect()  # a module without a reference averages nothing
        among = gc.get_objects()
    for module in among:
        if not issubclass(type(module), DistributedDataParallel):  # some objects answer isinstance() with an error
            continue
        ranks = dist.get_world_size(module.process_group)
        if ranks > 1 and any(id(parameter) in ours for parameter in module.parameters()):
            raise ConfigurationError(
                f"DistributedDataParallel averages these gradients over {ranks} processes, and each of them would push "
                f"the average: the model would move {ranks} times as far. Make one worker of these processes with "
                "psclient.NodeOptimizer (docs/nodes.md), or leave DistributedDataParallel out: then each is a worker"
            )


class PushedGradients:
    """The gradients of a step that was pushed and has not ended: the step, called again, must not push them again."""

    def __init__(self) -> None:
        self._pushed: dict[int, tuple[torch.Tensor, int]] = {}

    def note(self, gradients: Gradients) -> None:
        """Remember the gradients of a push."""
        self._pushed = {position: (gradient, gradient._version) for position, gradient in gradients.items()}

    def clear(self) -> None:
        """Forget them: the step has ended."""
        self._pushed = {}

    def matches(self, gradients: Gradients) -> bool:
        """Return whether these are the very same, unchanged: no backward pass has run since."""
        if not self._pushed or self._pushed.keys() != gradients.keys():
            return False
        return all(
            gradients[n] is before and before._version == version for n, (before, version) in self._pushed.items()
        )
