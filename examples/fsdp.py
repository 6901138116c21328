"""A model that no rank has whole: two ranks of FSDP2 are one worker, beside another worker with the whole model.

``python examples/fsdp.py`` starts a server, two ranks with a sharded transformer, and a plain worker; all train digits.
At the end it checks that the ranks have halves, that all have the server's model, and that the model has learned. For a
job of your own take :func:`train_sharded`: start one process a GPU with torchrun, and leave the rest out.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import psclient

RANKS = 2
SETTINGS = {"lr": 0.03, "momentum": 0.5, "density": 0.1}


class Rows(nn.Module):
    """A transformer that reads an image of 8 x 8 pixels row by row."""

    def __init__(self, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.place = nn.Parameter(torch.zeros(8, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits, ``[batch, 10]``, of images ``[batch, 8, 8]``."""
        x = self.embed(images) + self.place
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x.mean(1))
        return logits


def make_model() -> Rows:
    """Return the model; the same on all ranks, of which each keeps its part."""
    torch.manual_seed(0)
    return Rows()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images, fp32 ``[1797, 8, 8]``, and labels, int64."""
    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target, dtype=torch.int64)


def train(model: nn.Module, optimizer: Any, steps: int, seed: int, name: str) -> None:
    """Train on batches of this process's own; print the mean loss of each third of the steps."""
    images, labels = data()
    generator = torch.Generator().manual_seed(seed)
    part, total = steps // 3, 0.0
    for step in range(1, steps + 1):
        batch = torch.randint(0, len(images) - 360, (32,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        total += loss.item()
        if step % part == 0:
            print(f"{name}: step {step} of {steps}, loss {total / part:.3f}", flush=True)
            total = 0.0


def train_sharded(server: str, steps: int) -> dict[str, Any]:
    """Train as one rank of a worker; return what this rank has at the end."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # "cuda" on GPUs
    model = make_model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # Behind fully_shard: the parameters are DTensors then, and all ranks of the mesh are one worker.
    with psclient.NodeOptimizer(
        psclient.DGS, model.parameters(), model=model, server=server, worker="sharded", **SETTINGS
    ) as optimizer:
        train(model, optimizer, steps, 1 + dist.get_rank(), f"rank {dist.get_rank()}")
        optimizer.wait_for_all(300)
        optimizer.pull()
        return {
            "whole": {name: tensor.full_tensor().detach() for name, tensor in model.named_parameters()},
            "held": sum(parameter.to_local().numel() for parameter in model.parameters()),
            "samples": optimizer.totals.samples,
        }


def rank_process(rank: int, server: str, steps: int, folder: str) -> None:
    """Be one rank of the sharded worker."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    torch.save(train_sharded(server, steps), f"{folder}/rank-{rank}")
    dist.destroy_process_group()


def plain_process(_: int, server: str, steps: int) -> None:
    """Be a worker that has the whole model."""
    torch.set_num_threads(1)
    model = make_model()
    with psclient.DGS(model.parameters(), model=model, server=server, worker="plain", **SETTINGS) as optimizer:
        train(model, optimizer, steps, 100, "plain worker")
        optimizer.wait_for_all(300)


def check(condition: bool, text: str) -> None:
    """Raise :class:`SystemExit` if something is not as it must be; tell of it if it is."""
    if not condition:
        raise SystemExit(f"not so: {text}")
    print(f"ok: {text}")


def main() -> None:
    """Train with a server on this machine, and check what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, after which nothing is asked of the accuracy")
    quick = parser.parse_args().quick
    steps = 30 if quick else 300
    with psclient.LocalServer(down_mode="exact") as server, tempfile.TemporaryDirectory() as folder:
        plain = mp.spawn(plain_process, (server.server, steps), 1, join=False)
        ranks = mp.spawn(rank_process, (server.server, steps, folder), RANKS, join=False)
        for processes in (ranks, plain):
            while not processes.join():
                pass
        found = [torch.load(Path(folder) / f"rank-{rank}") for rank in range(RANKS)]
        saved = psclient.download(server.server)
    model = make_model()
    size = sum(parameter.numel() for parameter in model.parameters())
    check(sum(each["held"] for each in found) == size, f"the ranks hold {[each['held'] for each in found]} of {size}")
    check(max(each["held"] for each in found) < 0.6 * size, "no rank holds the whole model")
    check(found[0]["samples"] == RANKS * 32 * steps, "the worker counts the samples of its ranks")
    for name, tensor in saved.items():
        if not all(torch.equal(each["whole"][name], tensor) for each in found):
            raise SystemExit(f"not so: the ranks have the server's {name}")
    print("ok: the ranks have the server's model, bit for bit")
    if quick:
        return
    model.load_state_dict(saved)
    images, labels = data()
    with torch.no_grad():
        accuracy = (model.eval()(images[-360:]).argmax(1) == labels[-360:]).float().mean().item()
    check(accuracy > 0.7, f"accuracy {accuracy:.3f} on images that nobody has trained")


if __name__ == "__main__":
    main()
