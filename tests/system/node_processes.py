"""What the processes of nodes do in tests; :mod:`tests.system.rank_processes` starts them."""

import copy
import os
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

import psclient
from psclient.errors import SparsepsError
from tests.system import rank_processes
from tests.system.tools import QUICK, make_data, make_model, suspend, train_step

launch, launch_all = partial(rank_processes.launch, __name__), partial(rank_processes.launch_all, __name__)


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def half(rank: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's half of its node's batch."""
    x, y = make_data(seed)
    rows = slice(rank % 2, None, 2)
    return x[rows], y[rows]


def caught(call: Callable[[], Any]) -> SparsepsError | None:
    try:
        call()
    except SparsepsError as error:
        return error
    return None


def described(error: SparsepsError | None) -> tuple[str, str, dict[str, Any]]:
    return type(error).__name__, str(error), {} if error is None else dict(vars(error))


def dgs(model: nn.Module, server: str, **options: Any) -> psclient.NodeOptimizer:
    module = model.module if isinstance(model, DistributedDataParallel) else model
    options = {"lr": 0.1, "momentum": 0.5, "density": 0.1, "settings": QUICK} | options
    return psclient.NodeOptimizer(psclient.DGS, module.parameters(), model=model, server=server, **options)


def averages_rows(rank: int, server: str) -> Any:
    """DDP sums the sparse gradients of a table over the processes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(500, 8, mode="sum", sparse=True), nn.Linear(8, 1))
    ddp = DistributedDataParallel(model)
    found: dict[str, Any] = {"begin": parameters(model)}
    options = {"lr": 0.1, "settings": QUICK, "worker": "node"}
    with psclient.NodeOptimizer(psclient.ASGD, model.parameters(), model=ddp, server=server, **options) as optimizer:
        for step in range(3):
            optimizer.zero_grad()
            ddp(bags(step)[rank::2]).square().mean().backward()
            found["is sparse"] = model[0].weight.grad.is_sparse
            optimizer.step()
        return found | {"parameters": parameters(model), "entries": optimizer.totals.push_entries}


def bags(step: int) -> torch.Tensor:
    return torch.randint(0, 500, (8, 3), generator=torch.Generator().manual_seed(step))


def trains(rank: int, server: str) -> Any:
    """A node trains, and its state goes from one optimizer to the next."""
    ddp = DistributedDataParallel(make_model(rank, batch_norm=False))
    with dgs(ddp, server, worker="node") as optimizer:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        for _ in range(6):
            train_step(ddp, optimizer, *half(rank))
            scheduler.step()
        found = {"parameters": parameters(ddp), "samples": optimizer.totals.samples, "version": optimizer.version}
        saved = optimizer.state_dict()
        if rank == 0:
            torch.save(saved, "state.pt")
        optimizer.zero_grad()
        collected = get_optimizer_state_dict(ddp, optimizer)  # on each process, and no call of all
        found["collected"] = [memories["residual"] for memories in collected["state"].values()]
        found["version then"] = optimizer.version
        found["rate"] = optimizer.param_groups[0]["lr"]
    dist.barrier()
    with dgs(ddp, server, worker="node") as optimizer:
        loaded = torch.load("state.pt")
        optimizer.load_state_dict(loaded)
        again = copy.deepcopy(optimizer.state_dict())
        found["loaded"] = optimizer.param_groups[0]["lr"]
        found["residuals"] = [state["residual"] for state in again["state"].values()]
        found["saved residuals"] = [state["residual"] for state in loaded["state"].values()]
        optimizer.flush()
        optimizer.pull()
        found["flushed"] = parameters(ddp)
    return found


def loads_a_model(rank: int, server: str, loader: str) -> Any:
    """One process of a node loads a model before its first step."""
    ddp = DistributedDataParallel(make_model(0, batch_norm=False))
    with dgs(ddp, server, worker="node", lr=1e-3) as optimizer:
        if rank == int(loader):
            ddp.load_state_dict({name: torch.full_like(t, 5.0) for name, t in ddp.state_dict().items()})
        for _ in range(2):
            train_step(ddp, optimizer, *half(rank))
        optimizer.pull()
        return {"parameters": parameters(ddp)}


def meets_errors(rank: int, server: str) -> Any:
    """A node with BatchNorm and a frozen layer meets a gradient that is not finite, and the end of the run."""
    model = make_model(rank)
    model[0].requires_grad_(False)
    ddp = DistributedDataParallel(model, forward_sync_buffers=False)
    optimizer = dgs(ddp, server)
    found: dict[str, Any] = {"joined": parameters(model)}
    for _ in range(2):  # buffers are exchanged in the second
        train_step(ddp, optimizer, *half(rank))
    found["buffers"] = [buffer.clone() for buffer in model.buffers()]
    model[1].bias.grad.fill_(float("nan"))
    found["not finite"] = described(caught(optimizer.step))
    found["version"] = optimizer.version
    found["other calls"] = described(caught(optimizer.pull if rank == 0 else optimizer.flush))
    while not optimizer.finished:
        train_step(ddp, optimizer, *half(rank))
    found["end"] = optimizer.version
    found["finished"] = described(caught(optimizer.step))
    optimizer.pull()
    found["parameters"] = parameters(model)
    if rank == 0:
        optimizer.close()
    found["closed"] = described(caught(optimizer.step))
    dist.barrier()  # the leader's process goes on: the follower has heard from its connection alone
    optimizer.close()
    found["closed twice"] = described(caught(optimizer.step))
    other = make_model(0) if rank == 0 else nn.Sequential(nn.Linear(20, 4))
    found["other models"] = described(caught(lambda: dgs(other, server)))
    return found


def outlasts_a_standstill(rank: int, server: str, server_pid: str) -> Any:
    """The server stands still for longer than the node's patience, and goes on."""
    hasty = QUICK.model_copy(update={"deadline_seconds": 1.0, "patience_seconds": 1.5})
    ddp = DistributedDataParallel(make_model(rank, batch_norm=False))
    found: dict[str, Any] = {}
    with dgs(ddp, server, settings=hasty) as optimizer:
        train_step(ddp, optimizer, *half(rank))
        dist.barrier()
        if rank == 0:
            suspend(int(server_pid))
        x, y = half(rank)
        calls: list[int] = []

        def closure() -> str:
            calls.append(len(calls))
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(x), y).backward()
            return f"loss {calls[-1]}"

        found["error"] = described(caught(lambda: optimizer.step(closure)))
        if rank == 0:
            os.kill(int(server_pid), signal.SIGCONT)
        dist.barrier()
        found["losses"] = [optimizer.step(closure), optimizer.step(closure)]  # the first has been pushed
        found |= {"version": optimizer.version, "samples": optimizer.totals.samples, "parameters": parameters(ddp)}
    return found


def two_nodes(rank: int, server: str) -> Any:
    """Ranks 0 and 1 are a node, 2 and 3 another."""
    model = make_model(rank, batch_norm=False)
    ddp = DistributedDataParallel(model, process_group=psclient.node_group())
    optimizer = dgs(ddp, server)
    joined = parameters(model)
    dist.barrier()
    for step in range(4):
        train_step(ddp, optimizer, *half(rank, seed=rank // 2 + step))
    error = caught(lambda: optimizer.wait_for_all(0)) if rank >= 2 else None
    dist.barrier()
    optimizer.wait_for_all(100)  # the same on all processes
    optimizer.pull()
    found = {"joined": joined, "parameters": parameters(model), "version": optimizer.version}
    found["still training"] = getattr(error, "workers", None)
    found |= {"worker": optimizer.worker, "live": optimizer.live_workers, "samples": optimizer.totals.samples}
    dist.barrier()
    optimizer.close()
    return found


def _first_step(make: Callable[[nn.Module], torch.optim.Optimizer], rank: int, wrap: str, **ddp: Any) -> Any:
    """Make an optimizer over a model that DDP wraps before, after or never; return what its first step has met."""
    model = make_model(0, batch_norm=False)
    trained: nn.Module = DistributedDataParallel(model, **ddp) if wrap == "before" else model
    optimizer = make(model)
    if wrap == "after":
        trained = DistributedDataParallel(model, **ddp)
    error = caught(lambda: train_step(trained, optimizer, *half(rank)))
    optimizer.close()
    return {"error": described(error)}


def shards_its_model(rank: int, server: str) -> Any:
    """Models of which each process has a part, and every optimizer that is not for them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))

    def fsdp2() -> nn.Module:
        return fully_shard(make_model(0, batch_norm=False), mesh=mesh)

    def fsdp1(*, original: bool) -> nn.Module:
        return FullyShardedDataParallel(
            make_model(0, batch_norm=False), use_orig_params=original, device_id=torch.device("cpu")
        )

    def tensor_parallel() -> nn.Module:
        return parallelize_module(make_model(0, batch_norm=False), mesh, {"0": ColwiseParallel()})

    def frozen() -> nn.Module:
        model = make_model(0, batch_norm=False)
        fully_shard(model[0].requires_grad_(False), mesh=mesh)
        return model

    def node(parameters: Iterable[nn.Parameter], **module: Any) -> Any:
        options = {"lr": 0.1, "server": server, "settings": QUICK, "timeout_seconds": 60.0}
        return psclient.NodeOptimizer(psclient.DGS, parameters, **options, **module)

    name: dict[str, Any] = {"worker": f"w{rank}", "server": server, "settings": QUICK}
    models = {
        "fully_shard": fsdp2,
        "FSDP": partial(fsdp1, original=False),
        "FSDP, use_orig_params": partial(fsdp1, original=True),
        "tensor parallel": tensor_parallel,
        "frozen": frozen,
    }
    found = {}
    for kind, make in models.items():
        model = make()
        nodes = {
            "node": lambda model=model: node(model.parameters(), model=model),
            "bare node": lambda model=model: node(model.parameters()),
        }
        makers = {
            **(nodes if kind.startswith("FSDP") else {}),
            "DGS": lambda model=model: psclient.DGS(model.parameters(), 0.1, model=model, **name),
            "Outer": lambda model=model: psclient.Outer(
                torch.optim.SGD(model.parameters(), lr=0.1), sync_every=1, model=model, **name
            ),
        }
        found |= {(kind, method): described(caught(make)) for method, make in makers.items()}
    return found


def averages_without_a_node(rank: int, named: str, outer: str, bare: str, legitimate: str) -> Any:
    """Scripts that use DDP and forget NodeOptimizer, and others that only look like it; servers by what they train."""
    name: dict[str, Any] = {"worker": f"w{rank}", "settings": QUICK}
    alone = next(group for member in range(2) if (group := dist.new_group([member])) and member == rank)
    wrapped = DistributedDataParallel(make_model(0, batch_norm=False))

    def constructed(model: nn.Module) -> Any:
        options = {"lr": 0.1, "model": model, "server": named}
        return {"error": described(caught(lambda: psclient.DGS(wrapped.parameters(), **options, **name)))}

    def sparse(server: str, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
        return lambda model: psclient.DGS(model.parameters(), 0.1, model=model, server=server, **options, **name)

    def local(model: nn.Module) -> psclient.Outer:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        return psclient.Outer(inner, sync_every=1, model=model, server=outer, **name)

    def without_model(model: nn.Module) -> psclient.DGS:
        return psclient.DGS(model.parameters(), 0.1, server=bare, **name)

    return {
        "model is the DDP": constructed(wrapped),
        "compiled DDP": constructed(torch.compile(wrapped)),
        "wrapped before": _first_step(sparse(named), rank, "before"),
        "wrapped after": _first_step(sparse(named), rank, "after"),
        "overlap": _first_step(sparse(named, overlap=True), rank, "after"),
        "local steps": _first_step(local, rank, "after"),
        "bare parameters": _first_step(without_model, rank, "before"),
        "no DDP": _first_step(sparse(legitimate), rank, "never"),
        "DDP alone": _first_step(sparse(legitimate), rank, "before", process_group=alone),
    }


def _is_left(rank: int, server: str, victim: int, number: signal.Signals, *, amid: bool = False) -> Any:
    """The victim gets a signal; return what the other one meets, and after how many seconds."""
    model = make_model(batch_norm=False)
    optimizer = dgs(model, server, timeout_seconds=8.0)
    model(torch.ones(3, 20)).sum().backward()
    optimizer.step()
    if rank == victim:
        Path("victim").write_text(str(os.getpid()))
    if rank == victim and not amid:
        os.kill(os.getpid(), number)
    if rank == victim:
        optimizer._leader.step = lambda **_: os.kill(os.getpid(), number)
    started = time.monotonic()
    found = {"error": described(caught(optimizer.step)), "seconds": time.monotonic() - started}
    found["again"] = described(caught(optimizer.step))
    optimizer.close()
    if number == signal.SIGSTOP:
        os.kill(int(Path("victim").read_text()), signal.SIGKILL)
    return found


def follower_dies(rank: int, server: str) -> Any:
    return _is_left(rank, server, 1, signal.SIGKILL)


def follower_stands_still(rank: int, server: str) -> Any:
    return _is_left(rank, server, 1, signal.SIGSTOP)


def leader_dies_in_a_step(rank: int, server: str) -> Any:
    return _is_left(rank, server, 0, signal.SIGKILL, amid=True)


def leader_is_told_to_end_in_a_step(rank: int, server: str) -> Any:
    return _is_left(rank, server, 0, signal.SIGTERM, amid=True)
