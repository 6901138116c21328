"""What a worker cannot train, or cannot share with others: said by name, before anything is sent.

Each check looks at tensors and reads none: reading a parameter of which this process has a part is a collective, in
which it would wait for the others.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from psclient.errors import ConfigurationError
from psclient.model.memory import first_shared, repeats


def require_whole(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise :class:`ConfigurationError` if a process has a part of a tensor only: FSDP, tensor parallelism."""
    if not dist.is_available():
        return
    from torch.distributed.fsdp import FlatParameter
    from torch.distributed.tensor import DTensor

    for name, tensor in named:
        if isinstance(tensor, DTensor):
            kind = "a DTensor (fully_shard, tensor parallelism)"
        elif isinstance(tensor, FlatParameter) or getattr(tensor, "_fsdp_flattened", False):
            kind = "a parameter of FullyShardedDataParallel"
        else:
            continue
        raise ConfigurationError(
            f"{name!r} is {kind}: this process has a part of it, and a worker has to have the whole model. Train with "
            "DistributedDataParallel and psclient.NodeOptimizer, or freeze the base and train adapters "
            "(docs/nodes.md, Models that are sharded)"
        )


Named = Sequence[tuple[str, torch.Tensor]]


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
