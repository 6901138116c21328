"""What ranks do that publish together, in tests: each function is one scenario, on every rank."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard

import psclient
from psclient import Publisher
from psclient.errors import SparsepsError
from psclient.settings import ClientSettings
from tests.system import rank_processes
from tests.system.publishing.publishing_tools import QUIET, change, same_bits

launch = partial(rank_processes.launch, __name__)

PLACEMENTS = {
    "rows": [Replicate(), Shard(0)],
    "columns": [Shard(1), Replicate()],
    "both": [Shard(0), Shard(1)],
    "cube": [Shard(2), Shard(1)],
    "twice": [Shard(0), Shard(0)],
    "strided": [_StridedShard(0, split_factor=2), Shard(0)],
    "everywhere": [Replicate(), Replicate()],
    "fewer rows than ranks": [Shard(0), Shard(0)],
    "wide": [Shard(1), Shard(0)],
}


def whole() -> dict[str, torch.Tensor]:
    """Return the model that all ranks together have."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(13, 5), (6, 11), (7, 9), (3, 5, 8), (17, 2), (16, 3), (5,), (1, 4)]
    tensors = {
        name: torch.randn(size, generator=generator).bfloat16() for name, size in zip(PLACEMENTS, sizes, strict=False)
    }
    return tensors | {"wide": torch.randn(9, 4, generator=generator), "nothing": torch.empty(0, 3).bfloat16()}


def blocks(tensors: dict[str, torch.Tensor], rank: int, ranks: int = 4) -> dict[str, torch.Tensor]:
    """Return a rank's blocks; one tensor is on the third rank alone, and one is no DTensor."""
    mesh = init_device_mesh("cpu", (2, ranks // 2))
    found = {
        name: distribute_tensor(tensor, mesh, PLACEMENTS[name]) if name in PLACEMENTS else tensor.clone()
        for name, tensor in tensors.items()
    }
    return {name: tensor for name, tensor in found.items() if name != "nothing" or rank == 2}


def publisher(rank: int, server: str, baseline: str = "", settings: ClientSettings = QUIET) -> Publisher:
    return Publisher(server if rank == 0 else None, baseline=baseline, group=dist.group.WORLD, settings=settings)


def caught(publishing: Publisher, source: dict[str, torch.Tensor]) -> tuple[str, str]:
    try:
        return "published", str(publishing.publish(source).version)
    except SparsepsError as error:
        return type(error).__name__, str(error)


def publishes(rank: int, server: str) -> Any:
    """Version after version, of all placements; the first rank compares with what anybody downloads."""
    tensors, found = whole(), []
    with publisher(rank, server) as publishing:
        for number in range(4):
            if number:
                change(tensors, number)
            published = publishing.publish(blocks(tensors, rank))
            is_same = rank > 0 or same_bits(psclient.download(server), tensors)
            found.append((published.version, published.changed, is_same))
            dist.barrier()
    return found


def run_the_guides_loop(rank: int, server: str) -> Any:
    """Run what publishing.md has for several ranks."""
    page = (Path(__file__).parents[3] / "docs/guide/publishing.md").read_text()
    loop = page.split("## From several ranks")[1].split("```python\n")[1].split("```")[0]
    assert '"host:50051"' in loop
    tensors = whole()
    model = torch.nn.Module()
    names = {"path": "baseline", "batches": range(3), "model": model}

    def train(module: torch.nn.Module, batch: int) -> None:
        change(tensors, batch)
        for name, tensor in blocks(tensors, rank).items():
            module.register_buffer(name.replace(" ", "_"), tensor)

    exec(loop.replace('"host:50051"', repr(server)), names | {"train": train})
    renamed = {name.replace(" ", "_"): tensor for name, tensor in tensors.items()}
    found = rank > 0 or same_bits(psclient.download(server), renamed)
    dist.barrier()
    return found


def go_on(rank: int, server: str) -> Any:
    """New publishers, of other blocks and with a damaged file, publish what has changed since."""
    tensors, found = whole(), []
    with publisher(rank, server, "baseline") as publishing:
        publishing.publish(blocks(tensors, rank))
    for damaged in ("", "baseline.rank1", "baseline"):
        if damaged and rank == 0:
            file = Path(damaged)
            file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
        dist.barrier()
        tensors["both"][2, 3] += 1
        source = blocks(tensors, rank)
        if not damaged:
            mesh = init_device_mesh("cpu", (4,))
            source = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}
        with publisher(rank, server, "baseline") as publishing:
            published = publishing.publish(source)
        found.append((published.changed, rank > 0 or same_bits(psclient.download(server), tensors)))
        dist.barrier()
    return found


def refuse(rank: int, server: str) -> Any:
    """What cannot be published is refused on every rank, and the next publication is as if nothing had been."""
    tensors = whole()
    with publisher(rank, server) as publishing:
        published = publishing.publish(blocks(tensors, rank))
        mesh = init_device_mesh("cpu", (4,))
        sums = DTensor.from_local(torch.ones(3).bfloat16(), mesh, [Partial()])
        found = [caught(publishing, {**blocks(tensors, rank), "sums": sums})]
        sizes = torch.ones(3 + (rank == 1)).bfloat16()
        found.append(caught(publishing, {**blocks(tensors, rank), "sizes": sizes}))
        found.append(caught(publishing, {**blocks(tensors, rank), "more": torch.ones(3).bfloat16()}))
        found.append(caught(publishing, iter(blocks(tensors, rank).items()) if rank == 3 else blocks(tensors, rank)))
        change(tensors, 1)
        found.append(caught(publishing, blocks(tensors, rank)))
        is_same = rank > 0 or same_bits(psclient.download(server), tensors)
    return published.version, found, is_same


def lose_a_rank(rank: int, server: str) -> Any:
    """A rank dies; the others hear of it."""
    tensors = whole()
    publishing = publisher(rank, server)
    publishing.publish(blocks(tensors, rank))
    change(tensors, 1)
    source = blocks(tensors, rank)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    found = [caught(publishing, source), caught(publishing, source)]
    publishing.close()
    torch.save(found, str(rank))
    os._exit(0)  # a dead rank's partners may not end in order: gloo's threads abort the interpreter


def find_no_server(rank: int, server: str) -> Any:
    """The first rank reaches no server: every rank is told."""
    quick = ClientSettings(deadline_seconds=0.2, patience_seconds=0.5, connect_seconds=0.2)
    with publisher(rank, server, settings=quick) as publishing:
        return caught(publishing, blocks(whole(), rank))
