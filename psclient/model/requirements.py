"""What a worker cannot train, or cannot share with others: said by name, before anything is sent.

Each check looks at tensors and reads none: reading a parameter of which this process has a part is a collective, in
which it would wait for the others.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from psclient.errors import ConfigurationError


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
