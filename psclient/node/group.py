"""The processes of one node: which they are, and the name of their leader."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from psclient.errors import ConfigurationError
from psclient.model.wrappers import name_inside
from psclient.settings import LOCAL, ClientSettings, require_server, worker_name

_START_DISTRIBUTED = (
    "torch.distributed is not initialised; call torch.distributed.init_process_group() first (torchrun sets what it "
    "needs)"
)


def node_group(backend: str | None = None) -> dist.ProcessGroup:
    """Return a process group of the ranks on this node, for ``DistributedDataParallel(process_group=…)``.

    Every rank of the default group has to call it, as with ``torch.distributed.new_group``. If the default group is
    one node, it is a group of the same ranks.

    Args:
        backend: ``"nccl"`` or ``"gloo"``; that of the default group if not given.

    Raises:
        ConfigurationError: ``torch.distributed`` is not initialised, or nobody says which ranks are on this node.
    """
    if not dist.is_initialized():
        raise ConfigurationError(_START_DISTRIBUTED)
    ranks = node_ranks(dist.get_rank(), dist.get_world_size())
    # Only the members make it: nodes need neither wait for one another nor have the same number of ranks.
    group: dist.ProcessGroup = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
    return group


def node_ranks(rank: int, world_size: int, environment: Mapping[str, str] = os.environ) -> range:
    """Return the ranks of the node of ``rank``: neighbours, counted by ``LOCAL_RANK``."""
    local_rank, local_size = (environment.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if not (local_rank.isdigit() and local_size.isdigit()):
        raise ConfigurationError(
            "LOCAL_RANK and LOCAL_WORLD_SIZE, which say which ranks share this node, are not set; start the script "
            "with torchrun, set both, or make a group with torch.distributed.new_group()"
        )
    first = rank - int(local_rank)
    ranks = range(first, first + int(local_size))
    if first < 0 or ranks.stop > world_size or rank not in ranks:
        raise ConfigurationError(
            f"LOCAL_RANK={local_rank} and LOCAL_WORLD_SIZE={local_size} do not fit rank {rank} of {world_size}: the "
            "ranks of a node must be neighbours; set both as torchrun does"
        )
    return ranks


def unwrap_ddp(
    model: torch.nn.Module | None, group: dist.ProcessGroup | None
) -> tuple[torch.nn.Module | None, dist.ProcessGroup]:
    """Return the module that DDP wraps, and the group in which gradients are averaged."""
    if not dist.is_initialized():
        raise ConfigurationError(_START_DISTRIBUTED)
    wrapped = model
    while not isinstance(wrapped, DistributedDataParallel) and wrapped is not None:  # torch.compile() around DDP, say
        inside = name_inside(wrapped)
        wrapped = None if inside is None else getattr(wrapped, inside)
    if isinstance(wrapped, DistributedDataParallel):
        averaged_in: dist.ProcessGroup = wrapped.process_group
        if group is not None and group is not averaged_in:
            raise ConfigurationError("group is not the one that the model's DDP averages gradients in; leave it out")
        model, group = wrapped.module, averaged_in
    group = group or dist.group.WORLD
    if group is None or dist.get_rank(group) < 0:
        raise ConfigurationError(
            "this process is not in the group; pass the group of its own node (node_group()), or that of its mesh if "
            "the model is in parts"
        )
    return model, group


def require_meshes_in(group: dist.ProcessGroup, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise :class:`ConfigurationError` if a rank that has a part of a tensor is not in the group."""
    members = set(dist.get_process_group_ranks(group))
    known: set[int] = set()
    for name, tensor in named:
        mesh: Any = getattr(tensor, "device_mesh", None)
        if mesh is None or id(mesh) in known:
            continue
        known.add(id(mesh))
        ranks = sorted(mesh.mesh.flatten().tolist())
        if not members.issuperset(ranks):
            raise ConfigurationError(
                f"{name!r} lies on the ranks {ranks} of its mesh, and group has the ranks {sorted(members)}: pass a "
                "group with all ranks of the mesh, the same on each of them: mesh.get_group(), if the mesh has one "
                f"dimension, or torch.distributed.new_group({ranks}); without group= it is the default group"
            )


def leader_settings(settings: ClientSettings, group: dist.ProcessGroup) -> ClientSettings:
    """Return the leader's settings, with a name that no other node has."""
    require_server(settings)
    if settings.server == LOCAL:
        raise ConfigurationError(
            "a node needs the address of a server: an embedded one would be this node's alone. Start `psservice serve` "
            'and pass server="HOST:PORT" or set PSCLIENT_SERVER'
        )
    environment = dict(os.environ)
    if dist.get_world_size() == dist.get_world_size(group):
        environment.pop("RANK", None)  # each node was launched by itself, and counts from 0 as every other one does
    return settings.model_copy(update={"worker": worker_name(settings, environment)})
