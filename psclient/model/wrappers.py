"""Modules around a model that compute what it computes: the model inside has the names that a saved file needs."""

import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DataParallel, DistributedDataParallel


@functools.cache
def wrappers() -> dict[type[torch.nn.Module], str]:
    """Return the classes of modules that call a module inside, and its name there."""
    from torch._dynamo import OptimizedModule  # slow imports, done before: by the first torch.optim.Optimizer

    found: dict[type[torch.nn.Module], str] = {
        OptimizedModule: "_orig_mod",
        DataParallel: "module",
        DistributedDataParallel: "module",
    }
    if dist.is_available():
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
        from torch.distributed.fsdp import FullyShardedDataParallel

        found |= {ActivationWrapper: "_checkpoint_wrapped_module", FullyShardedDataParallel: "_fsdp_wrapped_module"}
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
