"""Small models, data and waiting, for tests with real server processes."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import psclient
from psclient.rpc.local_server import LocalServer
from psclient.settings import ClientSettings

QUICK = ClientSettings(server="local", deadline_seconds=5, connect_seconds=30, patience_seconds=30, dense_below=0)
"""Short time limits, no tensor exempt from selection, and a server for the test alone unless it names one."""


def make_model(seed: int = 0, *, batch_norm: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    norm = [nn.BatchNorm1d(32)] if batch_norm else []
    return nn.Sequential(nn.Linear(20, 32), *norm, nn.ReLU(), nn.Linear(32, 4))


def make_data(seed: int = 0, count: int = 256, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """A task that a linear model nearly solves."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 20, generator=generator)
    weights = torch.randn(20, 4, generator=torch.Generator().manual_seed(99))
    return x.to(dtype), (x @ weights).argmax(1)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x).float(), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Poll until a condition holds; fail if it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not so after {seconds} s: {condition}")
        time.sleep(0.02)


def suspend(pid: int) -> None:
    """Stop a process with SIGSTOP, and return when all its threads have stopped.

    ``os.kill`` returns before that: beside other load a thread may still answer a request.
    """
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    wait_until(lambda: all(_state(thread) == "T" for thread in threads.iterdir()))


def _state(thread: Path) -> str:
    """The state of a thread, as a letter: ``T`` is stopped; one that has ended meanwhile counts as stopped."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "T"


def stop(server: LocalServer, optimizer: torch.optim.Optimizer) -> None:
    """Make shard 0 hang, and the worker soon give it up; at all other times it is patient with a slow machine."""
    suspend(server.processes[0].pid)
    _set_limits(optimizer, deadline_seconds=0.5, patience_seconds=1.0)


def go_on(server: LocalServer, optimizer: torch.optim.Optimizer) -> None:
    """Undo :func:`stop`."""
    os.kill(server.processes[0].pid, signal.SIGCONT)
    _set_limits(optimizer, deadline_seconds=QUICK.deadline_seconds, patience_seconds=QUICK.patience_seconds)


def _set_limits(optimizer: torch.optim.Optimizer, **limits: float) -> None:
    membership = optimizer._run
    membership.settings = membership.settings.model_copy(update=limits)


def assert_same_parameters(model: nn.Module, server: str) -> None:
    """The replica equals the server's model, bit for bit."""
    state = psclient.download(server)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), state[name]), name
