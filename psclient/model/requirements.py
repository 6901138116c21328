"""What a worker cannot train, or cannot share with others: said by name, before anything is sent.

Each check looks at tensors and reads none: reading a parameter of which this process has a part is a collective, in
which it would wait for the others.
"""

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from psclient.errors import ConfigurationError
from psclient.model.memory import first_shared, repeats, unrepeated
from pscore.model.buffers import is_exchanged
from pscore.model.layout import BUFFER_DTYPES, TensorSpec
from pscore.wire.messages import DATA_TYPES

Named = Sequence[tuple[str, torch.Tensor]]


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Tell whether a process has a part of a tensor only, as DTensor: ``fully_shard``, tensor parallelism."""
    if not dist.is_available() or type(tensor) is torch.nn.Parameter:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's elements of a tensor: the very tensor that a DTensor has, or the tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():  # else it is another tensor, for autograd
        found: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return found


def require_whole(named: Named, buffers: Named, *, in_parts: bool) -> None:
    """Raise :class:`ConfigurationError` if a process has a part of a tensor only: FSDP, tensor parallelism.

    ``in_parts``: parameters may be DTensors.
    """
    if not dist.is_available():
        return
    from torch.distributed.fsdp import FlatParameter

    for name, tensor in (*named, *buffers):
        if isinstance(tensor, FlatParameter) or getattr(tensor, "_fsdp_flattened", False):
            raise ConfigurationError(
                f"{name!r} is a parameter of FullyShardedDataParallel, whose parts no worker can be made of: shard the "
                "model with torch.distributed.fsdp.fully_shard instead (docs/guide/fsdp.md)"
            )
    for name, tensor in buffers:
        if is_dtensor(tensor):
            raise ConfigurationError(
                f"buffer {name!r} is a DTensor, and a worker exchanges whole buffers: register it with "
                "persistent=False, or as a plain tensor (docs/guide/fsdp.md)"
            )
    for name, tensor in named:
        if is_dtensor(tensor) and not in_parts:
            raise ConfigurationError(
                f"{name!r} is a DTensor (fully_shard, tensor parallelism): this process has a part of it, and alone it "
                "is no worker. Make one worker of all ranks that have parts, with psclient.NodeOptimizer "
                "(docs/guide/fsdp.md)"
            )


def require_values(parameters: Named, frozen: Named, buffers: Named) -> None:
    """Raise :class:`ConfigurationError` if a tensor has no values yet, or of a kind that cannot be trained or sent."""
    for name, tensor in (*parameters, *frozen, *buffers):
        if is_lazy(tensor):
            raise ConfigurationError(
                f"{name!r} has no shape yet (torch.nn.Lazy…): call the model with one batch before the optimizer "
                "is made"
            )
    for name, parameter in parameters:
        if is_traceable_wrapper_subclass(parameter) and not is_dtensor(parameter):
            raise ConfigurationError(
                f"{name!r} is a {type(parameter).__name__}, which consists of other tensors, and only plain ones can "
                "be trained; freeze it (requires_grad_(False)), or take a plain torch.nn.Parameter"
            )
        if parameter.layout is not torch.strided:
            raise ConfigurationError(
                f"{name!r} is {_short(parameter.layout)}, and only dense parameters can be trained; convert it with "
                ".to_dense(), or freeze it (requires_grad_(False))"
            )
        if parameter.is_inference():
            raise ConfigurationError(_made_in_inference_mode(name))
    for name, parameter in frozen:
        if parameter.dtype not in DATA_TYPES:
            raise ConfigurationError(
                f"{name!r} is {_short(parameter.dtype)}, which cannot be described to a server; leave it out of model="
            )
    for name, buffer in buffers:
        is_plain = buffer.layout is torch.strided and not is_traceable_wrapper_subclass(buffer)
        if not is_plain or buffer.dtype not in BUFFER_DTYPES:
            kind = _short(buffer.dtype) if buffer.layout is torch.strided else _short(buffer.layout)
            raise ConfigurationError(
                f"buffer {name!r} is {type(buffer).__name__}, {kind}, which a server does not take; register it with "
                "persistent=False, and its values stay on the worker"
            )
        if not is_exchanged(TensorSpec(name, tuple(buffer.shape), buffer.dtype)):
            continue  # nothing is ever written to it
        if buffer.is_inference():
            raise ConfigurationError(_made_in_inference_mode(name))
        if repeats(buffer[unrepeated(buffer)]):
            raise ConfigurationError(
                f"several elements of buffer {name!r} are one in memory, so the run's average cannot be written to "
                "it; give it memory of its own with .clone()"
            )


def require_constant_in_forward(modules: Iterable[tuple[str, torch.nn.Module]]) -> None:
    """Raise :class:`ConfigurationError` if a module writes to a parameter when it is called: ``Embedding(max_norm=)``.

    A worker's parameters change only by what the server answers.
    """
    for prefix, module in modules:
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.max_norm is not None:
            name = f"{prefix}.weight" if prefix else "weight"
            raise ConfigurationError(
                f"{name!r} belongs to {type(module).__name__}(max_norm={module.max_norm:g}), which writes to its "
                "weight at each call, and a worker's parameters are the server's; leave max_norm out, and bound the "
                "rows that the module returns: torch.renorm(rows, 2, 0, max_norm)"
            )


def _made_in_inference_mode(name: str) -> str:
    return (
        f"{name!r} was made in torch.inference_mode(), where nothing that is written to later can be made; make the "
        "model outside of it"
    )


def _short(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.")


def require_own_memory(parameters: Named, frozen: Named, buffers: Named) -> None:
    """Raise :class:`ConfigurationError` if a trained parameter has an element in common with another tensor.

    Each would be trained by itself, and written over the other.
    """
    for name, parameter in parameters:
        if repeats(parameter):
            raise ConfigurationError(
                f"several elements of {name!r} are one in memory (expand(), say), so it cannot be trained; give it "
                "memory of its own with .clone()"
            )
    named = [*parameters, *frozen, *buffers]
    pair = first_shared([tensor for _, tensor in named], written=len(parameters))
    if pair is None:
        return
    (one, first), (other, second) = named[pair[0]], named[pair[1]]
    if pair[1] >= len(parameters) + len(frozen):
        raise ConfigurationError(
            f"buffer {other!r} lies in the memory of parameter {one!r}, and the server, which averages buffers, would "
            "write over the parameter; register it with persistent=False, or give it memory of its own with .clone()"
        )
    raise ConfigurationError(_shared_fault(one, first, other, second))


def _shared_fault(one: str, first: torch.Tensor, other: str, second: torch.Tensor) -> str:
    """Say that two parameters lie in the same memory, and what to do."""
    are_equal = (first.data_ptr(), first.shape, first.stride(), first.dtype) == (
        second.data_ptr(),
        second.shape,
        second.stride(),
        second.dtype,
    )
    tie = (
        "To tie them, let both modules have one Parameter (module.weight = other.weight) before the optimizer is made"
        if are_equal
        else "Compute one from the other in forward() (weight.t(), weight[:n])"
    )
    return (
        f"{other!r} and {one!r} are two parameters in the same memory (nn.Parameter(other.data), .data = or a view): "
        f"each would be trained by itself, over the other. {tie}, or give one memory of its own with .clone()"
    )


def refuse_averaged(parameters: Iterable[torch.Tensor], among: Iterable[Any] | None = None) -> None:
    """Raise :class:`ConfigurationError` if ``DistributedDataParallel`` averages the gradients of these parameters.

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
                "psclient.NodeOptimizer (docs/guide/nodes.md), or leave DistributedDataParallel out"
            )
