"""Modules around a model that compute what it computes: the model inside has the names that a saved file needs."""

import functools
import sys
from collections.abc import Iterator

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel


def wrappers() -> dict[type[torch.nn.Module], str]:
    """Return the classes of modules that call a module inside, and its name there.

    Without those that nothing has imported: no module is of such a class, and the import takes a second.
    """
    return _wrappers(*(name in sys.modules for name in ("torch._dynamo.eval_frame", *_OF_DISTRIBUTED)))


_OF_DISTRIBUTED = (
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
)


@functools.cache
def _wrappers(compiles: bool, checkpoints: bool, shards: bool) -> dict[type[torch.nn.Module], str]:
    found: dict[type[torch.nn.Module], str] = {DataParallel: "module", DistributedDataParallel: "module"}
    if compiles:
        from torch._dynamo.eval_frame import OptimizedModule

        found[OptimizedModule] = "_orig_mod"
    if checkpoints:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

        found[ActivationWrapper] = "_checkpoint_wrapped_module"
    if shards:
        from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel

        found[FullyShardedDataParallel] = "_fsdp_wrapped_module"
    return found


def name_inside(module: torch.nn.Module) -> str | None:
    """Return what a wrapper calls the module inside; ``None`` if it is no wrapper."""
    return next((name for kind, name in wrappers().items() if isinstance(module, kind)), None)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside all wrappers."""
    while isinstance(module, tuple(wrappers())):
        module = next(module.children())
    return module


def plain_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield ``named_modules(remove_duplicate=False)``, with the names that they have without wrappers."""
    seen: dict[str, tuple[str, torch.nn.Module]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        name = ""
        if path:
            above, _, own = path.rpartition(".")
            name, parent = seen[above]
            if own != name_inside(parent):
                name = f"{name}.{own}" if name else own
        seen[path] = name, module
        yield name, module


def plain_name(name: str) -> str:
    """Return a tensor's name, given without its module, without the prefixes that only wrappers have."""
    for prefix in set(wrappers().values()) - {"module"}:
        name = name.replace(f"{prefix}.", "")
    return name


def reshard(model: torch.nn.Module | None) -> None:
    """Have the modules of ``fully_shard`` let go of whole parameters that a forward pass has left; no rank speaks.

    They would not see what is written to the sharded ones.
    """
    if model is None or "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
