"""Collecting gradients, all of them or none: a non-finite one stops the step before anything has changed."""

from collections.abc import Container, Iterable

import torch

from psclient.errors import NonFiniteGradientError
from psclient.model import TrainedModel


def finite_gradients(model: TrainedModel, trained: Container[int], positions: Iterable[int]) -> dict[int, torch.Tensor]:
    """Return the gradients by position in the layout, dense, in their parameters' shapes and dtypes.

    Args:
        model: whose parameters.
        trained: ``id()`` of each parameter that the optimizer has; the others and those without a gradient are left
            out.
        positions: which tensors of the layout.

    Raises:
        NonFiniteGradientError: naming the first parameter concerned.
    """
    found: dict[int, torch.Tensor] = {}
    norms = []
    for position in positions:
        parameter = model.parameters[position]
        if id(parameter) not in trained or parameter.grad is None or not parameter.numel():
            continue
        gradient = parameter.grad.coalesce().to_dense() if parameter.grad.is_sparse else parameter.grad
        found[position] = gradient
        norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float32))
    # The norms are the fast test; one may overflow although every element is finite, so only elements convict.
    if norms and not bool(torch.stack([norm.to(norms[0].device) for norm in norms]).isfinite().all()):
        for position, gradient in found.items():
            if not bool(gradient.isfinite().all()):
                raise NonFiniteGradientError(model.layout.parameters[position].name)
    return found
