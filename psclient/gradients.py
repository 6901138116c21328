"""Collecting gradients, and refusing them all where one is not finite, before anything has changed."""

from collections.abc import Container, Iterable, Mapping

import torch

from psclient.errors import NonFiniteGradientError
from psclient.model import TrainedModel

Gradients = Mapping[int, torch.Tensor]
"""By position in the layout, in their parameters' shapes and dtypes."""


def gather(model: TrainedModel, trained: Container[int], positions: Iterable[int]) -> dict[int, torch.Tensor]:
    """Return the gradients that are there, as they are; costs nothing.

    Args:
        model: whose parameters.
        trained: ``id()`` of each parameter that the optimizer has; the others are left out.
        positions: which tensors of the layout.
    """
    found = {}
    for position in positions:
        parameter = model.parameters[position]
        if id(parameter) in trained and parameter.grad is not None and parameter.numel():
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
