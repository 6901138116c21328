"""The worker whose memory :mod:`benchmarks.scale.memory` watches: gradients of noise, and no passes.

It says each phase that has ended in a line, and goes on when a line comes back.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
from torch import nn

import psclient
from psclient.optim.base import ParameterServerOptimizer

VOCABULARY = 32_000
_LORA_RANK = 16
_NOISE = torch.randn(1 << 20, dtype=torch.float32, device="cpu", generator=torch.Generator("cpu").manual_seed(1))
_LAYER_MATRICES = (("q", 1, 1), ("k", 1, 1), ("v", 1, 1), ("o", 1, 1), ("up", 4, 1), ("down", 1, 4))
"""Of a layer: name, rows and columns in widths of the model."""

METHODS: dict[str, Callable[[nn.Module, str], ParameterServerOptimizer]] = {
    "rmsprop": lambda model, server: psclient.ServerRMSprop(
        _trained(model), lr=1e-4, budget=0.03, model=model, server=server
    ),
    "dgs": lambda model, server: psclient.DGS(_trained(model), lr=1e-4, budget=0.03, model=model, server=server),
    "asgd": lambda model, server: psclient.ASGD(_trained(model), lr=1e-4, model=model, server=server),
}
"""Each makes an optimizer of a model's trained parameters, by its name on the command line."""


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def model_of(shape: str, elements: int, dtype: torch.dtype) -> nn.Module:
    """Return about so many parameters: ``tensors`` for four large ones, ``transformer``, or ``lora``."""
    model = nn.Module()
    if shape == "tensors":
        for number in range(4):
            _add(model, f"weight{number}", (elements // 4 // 1024, 1024), dtype)
        return model
    width = min((w for w in range(256, 8192, 128)), key=lambda w: abs(_transformer(w, 3 * w // 256) - elements))
    layers = max(1, round((elements - VOCABULARY * width) / (12 * width**2)))
    is_frozen = shape == "lora"
    _add(model, "embedding", (VOCABULARY, width), dtype, trained=not is_frozen)
    for layer in range(layers):
        for name, rows, columns in _LAYER_MATRICES:
            shape_of = rows * width, columns * width
            _add(model, f"layer{layer}_{name}", shape_of, dtype, trained=not is_frozen)
            if is_frozen:
                _add(model, f"layer{layer}_{name}_a", (_LORA_RANK, shape_of[1]), dtype)
                _add(model, f"layer{layer}_{name}_b", (shape_of[0], _LORA_RANK), dtype)
        _add(model, f"layer{layer}_norm", (width,), dtype, trained=not is_frozen)
    return model


def _transformer(width: int, layers: int) -> int:
    return VOCABULARY * width + 12 * layers * width**2


def _add(model: nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, trained: bool = True) -> None:
    values = torch.empty(shape, dtype=dtype, device="cpu")
    _fill(values, 0.02)
    model.register_parameter(name, nn.Parameter(values, requires_grad=trained))


def _fill(tensor: torch.Tensor, deviation: float) -> None:
    """Fill a tensor with noise, of which blocks repeat: numbers for a billion elements would take most of the time."""
    for part in tensor.view(-1).split(_NOISE.numel()):
        part.copy_(_NOISE[: part.numel()]).mul_(deviation)


def _say(phase: str, model: nn.Module) -> None:
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    elements = sum(parameter.numel() for parameter in model.parameters())
    print(phase, sum(trained), elements, len(trained), flush=True)
    if not sys.stdin.readline():
        sys.exit(1)


def _step(model: nn.Module, optimizer: ParameterServerOptimizer) -> None:
    for parameter in _trained(model):
        assert parameter.grad is not None
        _fill(parameter.grad, 1.0)
    optimizer.step(samples=1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train a model of a size, phase by phase."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server")
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--shape", choices=("tensors", "transformer", "lora"), required=True)
    parser.add_argument("--elements", type=int, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--only-joins", action="store_true")
    options = parser.parse_args(arguments)
    _say("imports", nn.Module())
    model = model_of(options.shape, options.elements, getattr(torch, options.dtype))
    if not options.only_joins:
        for parameter in _trained(model):
            parameter.grad = torch.empty_like(parameter)
            _fill(parameter.grad, 1.0)
    _say("model", model)
    with METHODS[options.method](model, options.server) as optimizer:
        _say("join", model)
        if options.only_joins:
            return
        _step(model, optimizer)
        _say("first step", model)
        for _ in range(options.steps - 1):
            _step(model, optimizer)
        _say("steps", model)
        _say("snapshot", model)
        _step(model, optimizer)
        _say("restart", model)


if __name__ == "__main__":
    main()
