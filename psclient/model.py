"""What of a user's model is trained: names, layout, buffers, samples; found from ``model`` or from bare parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psclient.errors import ConfigurationError
from pscore.layout import ModelLayout, layout_of


@dataclass(frozen=True)
class TrainedModel:
    """A model's tensors in layout order.

    Attributes:
        layout: names, shapes, dtypes.
        parameters: every parameter, frozen ones included, each once even if tied.
        buffers: persistent buffers, in the layout's order.
    """

    layout: ModelLayout
    parameters: tuple[torch.Tensor, ...]
    buffers: tuple[torch.Tensor, ...]


def describe(model: torch.nn.Module | None, trained: Sequence[torch.Tensor]) -> TrainedModel:
    """Find the tensors of a model; without one, of bare parameters, which are then named by position.

    Raises:
        ConfigurationError: a trained parameter is not the model's, or a dtype cannot be trained.
    """
    if model is None:
        named = [(f"parameter_{i}", parameter) for i, parameter in enumerate(trained)]
        buffers: list[tuple[str, torch.Tensor]] = []
        aliases: dict[str, tuple[str, ...]] = {}
    else:
        named = list(model.named_parameters())
        buffers = _persistent_buffers(model)
        aliases = _aliases(model)
        known = {id(parameter) for _, parameter in named}
        if any(id(parameter) not in known for parameter in trained):
            raise ConfigurationError("params holds a parameter that model does not have; pass the model they come from")
    try:
        layout = layout_of(named, buffers, aliases)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    if layout.size == 0:
        raise ConfigurationError("there is nothing to train: the parameters have no elements")
    return TrainedModel(layout, tuple(parameter for _, parameter in named), tuple(tensor for _, tensor in buffers))


class SampleCounter:
    """Counts the samples that pass through a model in training mode: the first dimension of its first tensor input."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Hook into the model's forward."""
        self._count = 0
        self._handle = model.register_forward_pre_hook(self._on_forward, with_kwargs=True)

    def take(self) -> int:
        """Return the samples since the last call, at least 1 (a step without a forward that was seen)."""
        count, self._count = self._count, 0
        return max(1, count)

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def _on_forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training:
            return
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.dim():
                self._count += value.shape[0]
                return


def _persistent_buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    found, seen = [], set()
    for prefix, module in model.named_modules():
        for name, tensor in module._buffers.items():
            if tensor is None or name in module._non_persistent_buffers_set or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            found.append((f"{prefix}.{name}" if prefix else name, tensor))
    return found


def _aliases(model: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: tuple(others) for first, *others in names.values() if others}
