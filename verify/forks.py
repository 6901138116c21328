"""``python -m verify.forks``: fork beside a training worker, as scripts do, and count who does not end well.

Each step of each method is followed by a fork, when calls of gRPC are under way or have just ended. A child does
nothing, or loads a batch. Exits with 1 if one was aborted or hung.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

import psclient
from psclient.optim.base import ParameterServerOptimizer

_HUNG_SECONDS = 30.0
_LOADERS = 4


class _Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((20,), float(index))


def _fork() -> list[bool]:
    child = os.fork()
    if child == 0:
        os._exit(0)
    return [os.waitpid(child, 0)[1] == 0]


def _process() -> list[bool]:
    process = multiprocessing.get_context("fork").Process(target=bool)
    process.start()
    process.join(_HUNG_SECONDS)
    if process.is_alive():
        process.kill()
    return [process.exitcode == 0]


def _preexec() -> list[bool]:
    return [subprocess.run(["true"], preexec_fn=bool, timeout=_HUNG_SECONDS).returncode == 0]


def _loader() -> list[bool]:
    loader = DataLoader(
        _Samples(), batch_size=8, num_workers=_LOADERS, multiprocessing_context="fork", timeout=_HUNG_SECONDS
    )
    try:
        for _ in loader:
            pass
    except RuntimeError:  # "DataLoader worker (pid …) exited unexpectedly", or no batch in time
        return [False] + [True] * (_LOADERS - 1)
    return [True] * _LOADERS


WAYS: dict[str, tuple[Callable[[], list[bool]], int]] = {
    "os.fork": (_fork, 12),
    "Process": (_process, 2),
    "preexec_fn": (_preexec, 2),
    "DataLoader": (_loader, 1),
}
"""Each forks once or more, and tells of each child whether it ended well; and how often it is done in each turn."""

Made = Callable[[torch.nn.Module, dict[str, Any]], ParameterServerOptimizer]


def _local(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


METHODS: dict[str, Made] = {
    "dgs": lambda model, joined: psclient.DGS(model.parameters(), lr=0.01, **joined),
    "dgs, overlap": lambda model, joined: psclient.DGS(model.parameters(), lr=0.01, overlap=True, **joined),
    "dgc": lambda model, joined: psclient.DGC(model.parameters(), lr=0.01, **joined),
    "gradient dropping": lambda model, joined: psclient.GradientDropping(model.parameters(), lr=0.01, **joined),
    "asgd": lambda model, joined: psclient.ASGD(model.parameters(), lr=0.01, **joined),
    "asgd, overlap": lambda model, joined: psclient.ASGD(model.parameters(), lr=0.01, overlap=True, **joined),
    "ssgd": lambda model, joined: psclient.SSGD(model.parameters(), lr=0.01, **joined),
    "ssgd, overlap": lambda model, joined: psclient.SSGD(model.parameters(), lr=0.01, overlap=True, **joined),
    "server optimizer": lambda model, joined: psclient.ServerOptimizer(model.parameters(), "AdamW", **joined),
    "server rmsprop": lambda model, joined: psclient.ServerRMSprop(model.parameters(), budget=0.03, **joined),
    "outer": lambda model, joined: psclient.Outer(_local(model), sync_every=2, **joined),
    "wagma": lambda model, joined: psclient.WAGMA(_local(model), **joined),
}


def hammer(name: str, forks: int) -> dict[str, Counter[bool]]:
    """Train with a method and fork so often; count by the way of forking how many children ended well."""
    model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 5))
    counts: dict[str, Counter[bool]] = {way: Counter() for way in WAYS}
    with (
        psclient.LocalServer() as server,
        METHODS[name](model, {"model": model, "server": server, "worker": "w"}) as optimizer,
    ):
        while sum(count.total() for count in counts.values()) < forks:
            for way, (fork, times) in WAYS.items():
                for _ in range(times):
                    optimizer.zero_grad()
                    model(torch.ones(8, 20)).square().sum().backward()
                    optimizer.step()
                    counts[way].update(fork())
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    """Fork, print a table, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m verify.forks", description=__doc__)
    parser.add_argument("--forks", type=int, default=10_000, help="in all (default: %(default)s)")
    parser.add_argument("--method", choices=METHODS, action="append", help="default: all")
    options = parser.parse_args(arguments)
    methods = options.method or list(METHODS)
    table = Table("method", *(f"{way}: forks, lost" for way in WAYS))
    lost = total = 0
    torch.set_num_threads(1)
    for name in methods:
        counts = hammer(name, -(-options.forks // len(methods)))
        table.add_row(name, *(f"{count.total()}, {count[False]}" for count in counts.values()))
        lost += sum(count[False] for count in counts.values())
        total += sum(count.total() for count in counts.values())
    Console().print(table)
    print(f"{total} forks, {lost} children were aborted or hung")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
