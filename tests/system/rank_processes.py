"""Ranks of torch.distributed: ``python -m tests.system.rank_processes MODULE SCENARIOS RANKS FOLDER SERVER``.

A scenario is a function of a module, and gets the rank and what stands behind ``FOLDER``. Torch is loaded once, and
each rank is a fork of that; what it returns lies in ``FOLDER/scenario/rank``.
"""

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

RANKS_PER_NODE = 2


def launch(module: str, scenario: str, ranks: int, folder: Path, *servers: str) -> list[Any]:
    """Run a scenario; return what each rank has found, ``None`` for one that was killed."""
    return launch_all(module, [scenario], ranks, folder, *servers)[scenario]


def launch_all(module: str, scenarios: Sequence[str], ranks: int, folder: Path, *servers: str) -> dict[str, list[Any]]:
    """Run scenarios beside one another."""
    words = [module, ",".join(scenarios), str(ranks), str(folder), *servers]
    command = [sys.executable, "-m", "tests.system.rank_processes", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return {scenario: [_found(folder / scenario / str(rank)) for rank in range(ranks)] for scenario in scenarios}


def _found(file: Path) -> Any:
    return torch.load(file, weights_only=False) if file.exists() else None


def _rank(scenario: Callable[..., Any], rank: int, ranks: int, folder: str, servers: list[str]) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    os.environ |= {"LOCAL_RANK": str(rank % RANKS_PER_NODE), "LOCAL_WORLD_SIZE": str(min(ranks, RANKS_PER_NODE))}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
    limit = timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=limit)
    found = scenario(rank, *servers)
    torch.save(found, f"{folder}/part-{rank}")
    Path(f"{folder}/part-{rank}").rename(f"{folder}/{rank}")


def main() -> int:
    """Start the ranks of every scenario at once, and kill what is left after a minute."""
    name, scenarios, ranks, folder, *servers = sys.argv[1:]
    module = importlib.import_module(name)
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # loads the half of torch that waits for an optimizer
    fork = multiprocessing.get_context("fork")
    processes = []
    for scenario in scenarios.split(","):
        place = f"{folder}/{scenario}"
        Path(place).mkdir()
        for rank in range(int(ranks)):
            call = getattr(module, scenario)
            processes.append(fork.Process(target=_rank, args=(call, rank, int(ranks), place, servers)))
    for process in processes:
        process.start()
    end = time.monotonic() + 60
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    failed = any(process.exitcode not in (0, -signal.SIGKILL, 128 + signal.SIGTERM) for process in processes)
    for process in processes:
        process.kill()
    return failed


if __name__ == "__main__":
    sys.exit(main())
