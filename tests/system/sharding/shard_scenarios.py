"""What the ranks of sharded workers do in tests; :mod:`tests.system.rank_processes` starts them.

They do what docs/guide/fsdp.md shows.
"""

import logging
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import psclient
from psclient.errors import SparsepsError
from psclient.model.blocks import block_of
from psclient.model.requirements import local_of
from psclient.node.sharded import ShardedValues
from pscore.model.sparse_slice import SparseSlice, entries
from tests.system import rank_processes
from tests.system.tools import QUICK, make_data, make_model

launch, launch_all = partial(rank_processes.launch, __name__), partial(rank_processes.launch_all, __name__)

STEPS = 5
SPARSE: dict[str, tuple[Any, dict[str, Any]]] = {
    "dgs": (psclient.DGS, {"lr": 0.1, "momentum": 0.5, "density": 0.1}),
    "dgc": (psclient.DGC, {"lr": 0.1, "momentum": 0.5, "density": 0.1, "clip_norm": 5.0, "weight_decay": 0.01}),
    "dropping": (psclient.GradientDropping, {"lr": 0.1, "density": 0.05}),
    "rmsprop": (psclient.ServerRMSprop, {"lr": 0.01, "density": 0.1}),
}


class Shapes(nn.Module):
    """Parameters of odd shapes, so that blocks are unequal and some are empty."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in {"a": (7, 5), "b": (3,), "c": (1, 4), "d": (130, 6), "e": (4, 3, 2)}.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((x.mean() * each).sum() for each in self.parameters())


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [plain(parameter) for parameter in model.parameters()]


def caught(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except SparsepsError as error:
        return type(error).__name__, str(error)
    return "", ""


def gradient(step: int, number: int, shape: torch.Size) -> torch.Tensor:
    """The same on all ranks, and in the process of the test."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + number))


def give(model: nn.Module, step: int) -> None:
    """Give each parameter its rank's block of a gradient."""
    for number, parameter in enumerate(model.parameters()):
        block, local = block_of("", parameter)
        whole_gradient = gradient(step, number, parameter.shape)
        mine = torch.from_numpy(block.of(whole_gradient.reshape(-1).numpy(), 1)).view(local.shape).to(local.dtype)
        if isinstance(parameter, DTensor):
            mesh, placements, strides = parameter.device_mesh, parameter.placements, whole_gradient.stride()
            mine = DTensor.from_local(mine, mesh, placements, run_check=False, shape=parameter.shape, stride=strides)
        parameter.grad = mine


def node(kind: Any, model: nn.Module, server: str, **options: Any) -> psclient.NodeOptimizer:
    options = {"settings": QUICK, "timeout_seconds": 15.0, "worker": "node"} | options
    return psclient.NodeOptimizer(kind, model.parameters(), model=model, server=server, **options)


def steps_of(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        give(model, step)
        optimizer.step(samples=1)


def follows_given_gradients(model: nn.Module, server: str, method: str) -> Any:
    kind, options = SPARSE[method]
    with node(kind, model, server, **options) as optimizer:
        steps_of(model, optimizer, range(STEPS))
        runs = [block_of(name, parameter)[0].runs for name, parameter in model.named_parameters()]
        return {"whole": whole(model), "runs": runs, "version": optimizer.version, "report": optimizer.report}


def halves(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = make_data(step)
    return x[rank % 2 :: 2], y[rank % 2 :: 2]


def trains(model: nn.Module, optimizer: Any, rank: int, steps: int = 4) -> None:
    for step in range(steps):
        x, y = halves(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


# Two ranks

DENSE: dict[str, tuple[Any, dict[str, Any]]] = {
    "asgd": (psclient.ASGD, {"lr": 0.1, "momentum": 0.5}),
    "adamw": (psclient.ServerOptimizer, {"optimizer": "AdamW", "options": {"lr": 0.01}}),
}


def dense(rank: int, server: str, ddp_server: str, *, method: str) -> Any:
    kind, options = DENSE[method]
    sharded = make_model(0)
    fully_shard(sharded[0], mesh=init_device_mesh("cpu", (2,)))
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    found = {}
    with node(kind, sharded, server, **options) as optimizer:
        trains(sharded, optimizer, rank)
        sharded.eval()(make_data()[0])  # leaves whole parameters behind
        optimizer.pull()
        found["sharded"] = whole(sharded)
        found["buffers"] = [buffer.clone() for buffer in sharded.buffers()]
        found["samples"], found["version"] = optimizer.totals.samples, optimizer.version
        found["after eval"] = sharded(make_data()[0]).detach()
    model = make_model(0)
    ddp = DistributedDataParallel(model)
    with node(kind, ddp, ddp_server, **options) as optimizer:
        trains(ddp, optimizer, rank)
        optimizer.pull()
        found["ddp"] = whole(ddp)
    found["expected after eval"] = model.eval()(make_data()[0]).detach()
    return found


def asgd(rank: int, *servers: str) -> Any:
    return dense(rank, *servers[0:2], method="asgd")


def adamw(rank: int, *servers: str) -> Any:
    return dense(rank, *servers[2:4], method="adamw")


def sharded_shapes(seed: int = 0, ranks: int = 2, **options: Any) -> nn.Module:
    return fully_shard(Shapes(seed, **options), mesh=init_device_mesh("cpu", (ranks,)))


def dgs(rank: int, *servers: str) -> Any:
    return follows_given_gradients(sharded_shapes(), servers[4], "dgs")


def dgc(rank: int, *servers: str) -> Any:
    return follows_given_gradients(sharded_shapes(), servers[5], "dgc")


def dropping(rank: int, *servers: str) -> Any:
    return follows_given_gradients(sharded_shapes(), servers[6], "dropping")


def rmsprop(rank: int, *servers: str) -> Any:
    return follows_given_gradients(sharded_shapes(), servers[7], "rmsprop")


def meets_errors(rank: int, *servers: str) -> Any:
    """Gradients that are not finite, or lie otherwise; a model that is loaded; calls that differ."""
    model, server = sharded_shapes(), servers[8]
    kind, options = SPARSE["dgs"]
    found: dict[str, Any] = {}
    with node(kind, model, server, **options) as optimizer:
        steps_of(model, optimizer, range(1))
        give(model, 1)
        if rank == 1:
            model.d.grad.to_local()[3, 2] = float("nan")
        found["not finite"] = caught(lambda: optimizer.step(samples=1))
        give(model, 1)
        local = model.d.grad.full_tensor()
        model.d.grad = DTensor.from_local(local, model.d.device_mesh, [Partial()], run_check=False)
        found["partial"] = caught(lambda: optimizer.step(samples=1))
        found["version"] = optimizer.version
        steps_of(model, optimizer, range(1, 2))
        optimizer.flush()
        optimizer.pull()
        found["whole"] = whole(model)
        if rank == 1:
            local_of(model.d).zero_()
        give(model, 2)
        found["loaded"] = caught(lambda: optimizer.step(samples=1))
        optimizer.pull()
        found["pulled"] = whole(model)
        found["other calls"] = caught(optimizer.pull if rank == 0 else optimizer.flush)
    return found


def begins_with_a_file(rank: int, *servers: str) -> Any:
    """The model is loaded behind the optimizer, before the first push."""
    model, server = sharded_shapes(1), servers[9]
    with node(psclient.ASGD, model, server, lr=0.1) as optimizer:
        wanted = dict(Shapes(2).named_parameters())
        for name, parameter in model.named_parameters():
            block, local = block_of(name, parameter)
            flat = wanted[name].detach().reshape(-1).numpy()
            with torch.no_grad():
                local_of(parameter).copy_(torch.from_numpy(block.of(flat, 1)).view(local.shape))
        optimizer.pull()
        return {"whole": whole(model)}


def saves(rank: int, *servers: str) -> Any:
    """Its state goes to another optimizer, and to a checkpoint."""
    server, folder = servers[10], servers[-1]
    kind, options = SPARSE["dgs"]
    model = sharded_shapes()
    with node(kind, model, server, **options) as optimizer:
        steps_of(model, optimizer, range(3))
        version = optimizer.version
        optimizer.zero_grad()
        collected = get_optimizer_state_dict(model, optimizer)
        found: dict[str, Any] = {"pushed": optimizer.version - version}
        saved = optimizer.state_dict()
        found["residuals"] = [plain(state["residual"]) for state in saved["state"].values()]
        found["collected"] = [plain(state["residual"]) for state in collected["state"].values()]
        torch.save(saved, f"state-{rank}")
        dcp.save({"optimizer": collected}, checkpoint_id=folder)
    dist.barrier()
    with node(kind, model, server, **options) as optimizer:
        optimizer.load_state_dict(torch.load(f"state-{rank}", weights_only=False))
        found["loaded"] = [plain(state["residual"]) for state in optimizer.state_dict()["state"].values()]
        found["alone"] = caught(lambda: optimizer.load_state_dict(broken(optimizer.state_dict(), rank)))
    return found


def rounded(rank: int, *servers: str) -> Any:
    """Values in 8 bits, whose rounding errors come back to the ranks that have the blocks."""
    model = sharded_shapes()
    settings = QUICK.model_copy(update={"value_type": "int8"})
    with node(psclient.GradientDropping, model, servers[12], lr=0.1, density=0.3, settings=settings) as optimizer:
        steps_of(model, optimizer, range(STEPS))
        optimizer.flush()
        optimizer.pull()
        return {"whole": whole(model)}


def kept_in_16_bits(rank: int, *servers: str) -> Any:
    """Residuals in bf16, of every rank."""
    model = sharded_shapes()
    settings = QUICK.model_copy(update={"residual_type": "bf16"})
    with node(psclient.GradientDropping, model, servers[14], lr=0.1, density=0.3, settings=settings) as optimizer:
        steps_of(model, optimizer, range(STEPS))
        types = {str(state["residual"].dtype) for state in optimizer.state_dict()["state"].values()}
        optimizer.flush()
        optimizer.pull()
        return {"whole": whole(model), "types": types}


def images(rank: int, *servers: str) -> Any:
    """Half precision, and a server that answers with the largest differences."""
    model = sharded_shapes(dtype=torch.bfloat16)
    kind, options = SPARSE["dgs"]
    with node(kind, model, servers[13], **options) as optimizer:
        steps_of(model, optimizer, range(STEPS))
        found = {"mode": optimizer.report.reply_mode, "before": whole(model)}
        optimizer.pull()
        return found | {"whole": whole(model)}


def large(rank: int, *servers: str) -> Any:
    """A model of 12 MB comes whole, and is passed on in parts."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(1500, 2000), mesh=init_device_mesh("cpu", (2,)))
    sizes: list[int] = []
    before = ShardedValues.write

    def write(self: ShardedValues, segments: Sequence[SparseSlice]) -> None:
        sizes.append(entries(segments))
        before(self, segments)

    ShardedValues.write = write
    with node(psclient.ASGD, model, servers[11], lr=0.1) as optimizer:
        optimizer.pull()
        sizes.clear()
        if rank == 0:
            for shard in optimizer._leader._run.shards:
                shard.forget_base()
        with torch.no_grad():
            for parameter in model.parameters():
                local_of(parameter).data.zero_()  # without a trace
        optimizer.pull()
        return {"whole": whole(model), "sizes": sizes, "entries": optimizer.report.pull_entries}


def broken(state: dict[str, Any], rank: int) -> dict[str, Any]:
    if rank == 1:
        state["state"][0]["residual"] = torch.zeros(3)
    return state


def refuses_other_groups(rank: int, *servers: str) -> Any:
    """A group that lacks ranks of the mesh; hyper-parameters that differ among ranks."""
    alone = [dist.new_group([each]) for each in range(2)][rank]
    model, server = sharded_shapes(), servers[15]
    kind, options = SPARSE["dgs"]
    found = {
        "alone": caught(lambda: node(kind, model, server, group=alone, **options)),
        "rate": caught(lambda: node(kind, model, server, **options | {"lr": 0.1 + rank})),
    }
    parameters, cut = list(model.parameters()), 2 + rank
    groups = [{"params": parameters[:cut]}, {"params": parameters[cut:], "lr": 0.5}]
    found["groups"] = caught(
        lambda: psclient.NodeOptimizer(kind, groups, model=model, server=server, timeout_seconds=15.0, **options)
    )
    return found


def refuses_other_steps(rank: int, *servers: str) -> Any:
    """A rate that one rank sets alone, a group that one adds alone, and a rank without gradients."""
    model, server = sharded_shapes(), servers[16]
    kind, options = SPARSE["dropping"]
    parameters = list(model.parameters())
    found: dict[str, Any] = {}
    settings = {"settings": QUICK, "timeout_seconds": 15.0, "worker": "node"}
    with psclient.NodeOptimizer(kind, parameters[:-1], model=model, server=server, **settings, **options) as optimizer:
        before = whole(model)

        def step() -> None:
            give(model, 0)
            optimizer.step(samples=1)

        optimizer.param_groups[0]["lr"] = 0.1 + rank
        found["rate"] = caught(step)
        optimizer.param_groups[0]["lr"] = 0.1
        give(model, 0)
        if rank == 1:
            optimizer.zero_grad()
        found["no gradient"] = caught(lambda: optimizer.step(samples=1))
        give(model, 0)
        if rank == 0:
            optimizer.zero_grad()
        found["no gradient of the leader"] = caught(lambda: optimizer.step(samples=1))
        found["version"], found["untouched"] = optimizer.version, all(map(torch.equal, before, whole(model)))
        give(model, 0)
        if rank == 1:
            model.d.grad = None  # an expert, say, whose block here no token has reached
        optimizer.step(samples=1)
        optimizer.flush()
        optimizer.pull()
        block = block_of("d", model.d)[0]
        found["whole"], found["d"] = whole(model), block.offsets(np.arange(block.numel), 1).tolist()
        if rank == 0:
            optimizer.add_param_group({"params": parameters[-1:]})
        found["group"] = caught(step)
    return found


def ends_in_order(rank: int, *servers: str) -> Any:
    """SIGTERM reaches one rank, and all push what they hold: docs/guide/fsdp.md, SIGTERM."""
    model = sharded_shapes()
    kind, options = SPARSE["dropping"]
    terminated = torch.zeros(1)
    signal.signal(signal.SIGTERM, lambda *_: terminated.fill_(1))
    with node(kind, model, servers[17], **options) as optimizer:
        step = 0
        while True:
            give(model, step)
            optimizer.step(samples=1)
            step += 1
            if rank == 1 and step == STEPS:
                os.kill(os.getpid(), signal.SIGTERM)
            dist.all_reduce(terminated)
            if terminated:
                optimizer.flush()
                break
    return {"steps": step}


# Four ranks


def rows(rank: int, *servers: str) -> Any:
    """Two rows of ranks, each with the whole model and batches of its own, as one worker."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "shard"))["shard"]
    model = fully_shard(Shapes(), mesh=mesh)
    with node(psclient.ASGD, model, servers[5], lr=0.1) as optimizer:
        model(torch.ones(3) * (1 + rank // 2)).backward()
        return {"error": caught(lambda: optimizer.step(samples=1)), "version": optimizer.version}


def resumes(rank: int, *servers: str) -> Any:
    """What two ranks have saved goes on with four."""
    server, folder = servers[0], servers[-1]
    kind, options = SPARSE["dgs"]
    model = sharded_shapes(ranks=4)
    with node(kind, model, server, **options) as optimizer:
        state = get_optimizer_state_dict(model, optimizer)
        dcp.load({"optimizer": state}, checkpoint_id=folder)
        set_optimizer_state_dict(model, optimizer, state)
        found = {"loaded": [plain(each["residual"]) for each in optimizer.state_dict()["state"].values()]}
        steps_of(model, optimizer, range(3, 4))
        optimizer.flush()
        optimizer.pull()
        return found | {"whole": whole(model)}


def hybrid(rank: int, *servers: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return follows_given_gradients(fully_shard(Shapes(), mesh=mesh), servers[1], "dgc")


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.norm = nn.Linear(6, 9), nn.Linear(9, 6), nn.LayerNorm(6)


def tensor_parallel(rank: int, *servers: str) -> Any:
    mesh = init_device_mesh("cpu", (4,))
    model = parallelize_module(Pair(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return follows_given_gradients(model, servers[2], "dgs")


def two_dimensions(rank: int, *servers: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(Pair(), mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return follows_given_gradients(fully_shard(model, mesh=mesh["data"]), servers[3], "dgc")


class Adapted(nn.Module):
    """A frozen base, and a small part that is trained; in bf16."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.base = nn.Parameter(torch.randn(33, 20, generator=generator).bfloat16(), requires_grad=False)
        self.adapter = nn.Parameter(torch.randn(9, 20, generator=generator).bfloat16())


def frozen(rank: int, *servers: str) -> Any:
    model = fully_shard(Adapted(), mesh=init_device_mesh("cpu", (4,)))
    found = follows_given_gradients_of(model, model.adapter, servers[4])
    with node(psclient.ASGD, model, servers[4], lr=0.1) as optimizer:
        if rank == 3:
            local_of(model.base).zero_()
        found["changed"] = caught(lambda: optimizer.step(samples=1))
    return found


def follows_given_gradients_of(model: nn.Module, adapter: nn.Parameter, server: str) -> dict[str, Any]:
    with node(psclient.ASGD, model, server, lr=0.1) as optimizer:
        for step in range(2):
            block, local = block_of("", adapter)
            mine = torch.from_numpy(block.of(gradient(step, 0, adapter.shape).reshape(-1).numpy(), 1))
            adapter.grad = DTensor.from_local(
                mine.view(local.shape).bfloat16(),
                adapter.device_mesh,
                adapter.placements,
                run_check=False,
                shape=adapter.shape,
                stride=adapter.stride(),
            )
            optimizer.step(samples=1)
        return {"whole": whole(model), "version": optimizer.version}


# Ends


def _is_left(rank: int, server: str, victim: int) -> Any:
    model = sharded_shapes()
    kind, options = SPARSE["dgs"]
    optimizer = node(kind, model, server, **options)
    steps_of(model, optimizer, range(1))
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    give(model, 1)
    found = {"error": caught(lambda: optimizer.step(samples=1)), "again": caught(lambda: optimizer.step(samples=1))}
    optimizer.close()
    return found


def follower_dies(rank: int, *servers: str) -> Any:
    return _is_left(rank, servers[0], 1)


def leader_dies(rank: int, *servers: str) -> Any:
    return _is_left(rank, servers[1], 0)


def follower_dies_in_a_step(rank: int, *servers: str) -> Any:
    """The leader waits for what the other rank has selected."""
    model = sharded_shapes()
    optimizer = node(*_dgs(model, servers[2]))
    steps_of(model, optimizer, range(1))
    if rank == 1:
        optimizer._ranks.rank.compress = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    give(model, 1)
    found = {"error": caught(lambda: optimizer.step(samples=1))}
    optimizer.close()
    return found


def leader_is_terminated(rank: int, *servers: str) -> Any:
    """Without a handler of the script's; its log line lies in the folder."""
    model = sharded_shapes()
    optimizer = node(*_dgs(model, servers[3]))
    steps_of(model, optimizer, range(1))
    if rank == 0:
        logging.getLogger("psclient").addHandler(logging.FileHandler("log"))
        os.kill(os.getpid(), signal.SIGTERM)
    give(model, 1)
    found = {"error": caught(lambda: optimizer.step(samples=1))}
    optimizer.close()
    return found


def _dgs(model: nn.Module, server: str) -> tuple[Any, nn.Module, str]:
    kind, options = SPARSE["dgs"]
    return partial(kind, **options), model, server
