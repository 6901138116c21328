"""Collecting gradients, and refusing them all where one is not finite, before anything has changed."""

from collections.abc import Container, Iterable, Mapping

import torch

from psclient.errors import NonFiniteGradientError
from psclient.model import TrainedModel

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
