"""A model and gradients without a forward pass: what an optimizer sees of training."""

import torch

from pscore.model.layout import ModelLayout


class SyntheticModel(torch.nn.Module):
    """A module with the parameters and buffers of a layout and no forward."""

    def __init__(self, layout: ModelLayout) -> None:
        """Create every tensor where its name says."""
        super().__init__()
        for spec in layout.parameters:
            module, name = self._home(spec.name)
            module.register_parameter(name, torch.nn.Parameter(torch.zeros(spec.shape, dtype=spec.dtype)))
        for spec in layout.buffers:
            module, name = self._home(spec.name)
            module.register_buffer(name, torch.zeros(spec.shape, dtype=spec.dtype))

    def _home(self, path: str) -> tuple[torch.nn.Module, str]:
        *parents, name = path.split(".")
        module: torch.nn.Module = self
        for parent in parents:
            if parent not in module._modules:
                module.add_module(parent, torch.nn.Module())
            module = module.get_submodule(parent)
        return module, name


class Noise:
    """Gradients of Laplace noise: pieces from random places of a pool that is drawn once."""

    def __init__(self, layout: ModelLayout, seed: int) -> None:
        """Draw the pool."""
        self._generator = torch.Generator().manual_seed(seed)
        self._length = 2 * max(spec.numel for spec in layout.parameters)
        self._pool = torch.empty(self._length).exponential_(generator=self._generator)
        self._pool *= torch.empty(self._length).uniform_(-1, 1, generator=self._generator).sign_()

    def fill(self, model: torch.nn.Module) -> None:
        """Give every parameter a new gradient."""
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(self.like(parameter))

    def like(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a piece in a parameter's shape: a view of the pool."""
        highest = self._length - parameter.numel()
        start = int(torch.randint(highest, (), generator=self._generator))
        return self._pool[start : start + parameter.numel()].view(parameter.shape)
