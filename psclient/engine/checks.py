"""Collecting gradients, and refusing them where one is not finite, or where other workers push the same."""

import gc
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from psclient.errors import ConfigurationError, NonFiniteGradientError
from psclient.model.module import TrainedModel

Gradients = Mapping[int, torch.Tensor]
"""By position in the layout, in their parameters' shapes and dtypes."""


def gather(model: TrainedModel, trained: Container[torch.Tensor], positions: Iterable[int]) -> dict[int, torch.Tensor]:
    """Return the gradients that are there, as they are; costs nothing.

    Args:
        model: whose parameters.
        trained: the parameters that the optimizer has; the others are left out.
        positions: which tensors of the layout.
    """
    found = {}
    for position in positions:
        parameter = model.parameters[position]
        if parameter in trained and parameter.grad is not None and parameter.numel():
            found[position] = parameter.grad
    return found


def finite(model: TrainedModel, gradients: Gradients) -> dict[int, torch.Tensor]:
    """Return the gradients dense, all of them finite.

    Raises:
        NonFiniteGradientError: naming the first parameter concerned.
    """
    dense = {
        position: gradient.coalesce().to_dense() if gradient.is_sparse else gradient
        for position, gradient in gradients.items()
    }
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in dense.values()]
    # The norms are the fast test; one may overflow although every element is finite, so only elements convict.
    if norms and not bool(torch.stack([norm.to(norms[0].device) for norm in norms]).isfinite().all()):
        for position, gradient in dense.items():
            if not bool(gradient.isfinite().all()):
                raise NonFiniteGradientError(model.layout.parameters[position].name)
    return dense


def refuse_averaged(parameters: Iterable[torch.Tensor], among: Iterable[Any] | None = None) -> None:
    """Make sure that no ``DistributedDataParallel`` averages the gradients of these parameters over several processes.

    Args:
        parameters: which.
        among: where to look for one. By default all live objects are looked through, which takes a moment: such a
            module leaves no mark on its parameters.

    Raises:
        ConfigurationError: one does.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    from torch.nn.parallel import DistributedDataParallel

    ours = {id(parameter) for parameter in parameters}
    if among is None:
        gc.collect()  # a module that nobody has any more averages nothing
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


class Interrupted:
    """The gradients of a step that was pushed and not ended: if it is called again, they must not be pushed again."""

    def __init__(self) -> None:
        """There are none."""
        self._found: dict[int, tuple[torch.Tensor, int]] = {}

    def note(self, gradients: Gradients) -> None:
        """Remember them."""
        self._found = {position: (gradient, gradient._version) for position, gradient in gradients.items()}

    def clear(self) -> None:
        """Forget them."""
        self._found = {}

    def holds(self, gradients: Gradients) -> bool:
        """Tell whether these are the very same, unchanged: no backward pass has run since."""
        if not self._found or self._found.keys() != gradients.keys():
            return False
        noted = (self._found[position] for position in gradients)
        return all(
            gradient is before and gradient._version == version
            for gradient, (before, version) in zip(gradients.values(), noted, strict=True)
        )
