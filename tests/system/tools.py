"""Small models, data and waiting, for tests with real server processes."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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


METHODS: dict[str, Callable[..., Any]] = {
    "asgd": psclient.ASGD,
    "overlap": partial(psclient.ASGD, overlap=True),
    "ssgd": psclient.SSGD,
    "dropping": psclient.GradientDropping,
    "dgs": psclient.DGS,
    "dgc": psclient.DGC,
    "rmsprop": psclient.ServerRMSprop,
    "sgd": lambda params, lr, **more: psclient.ServerOptimizer(params, "SGD", {"lr": lr}, **more),
    "adamw": lambda params, lr, **more: psclient.ServerOptimizer(params, "AdamW", {"lr": lr}, **more),
    "outer": lambda params, lr, **more: psclient.Outer(torch.optim.SGD(params, lr=lr), **{"sync_every": 2, **more}),
    "wagma": lambda params, lr, **more: psclient.WAGMA(torch.optim.SGD(params, lr=lr), **more),
}
"""Every method by a name; those of the server and of local steps with one optimizer of torch's."""


def optimizer_of(method: str, model: nn.Module, lr: float = 0.1, **options: Any) -> Any:
    """Of one of ``METHODS``, for all parameters of a model."""
    return METHODS[method](model.parameters(), lr=lr, **{"model": model, "settings": QUICK, **options})


class Worker(NamedTuple):
    """A model and its optimizer."""

    model: nn.Module
    optimizer: Any

    def train(self, x: torch.Tensor, y: torch.Tensor) -> float:
        return train_step(self.model, self.optimizer, x, y)


def fleet(make: Callable[..., Any], server: LocalServer, count: int = 2, **options: Any) -> list[Worker]:
    """Workers of a method, each with a model of its own seed."""
    batch_norm, dtype = options.pop("batch_norm", True), options.pop("dtype", torch.float32)
    models = [make_model(seed, batch_norm=batch_norm).to(dtype) for seed in range(count)]
    options = {"server": server, "settings": QUICK, **options}
    return [
        Worker(model, make(model.parameters(), model=model, worker=f"w{number}", **options))
        for number, model in enumerate(models)
    ]


def at_once(work: Callable[[Any], Any], given: Iterable[Any], seconds: float = 60.0) -> list[Any]:
    """Call ``work`` with each of these, in a thread of its own; return the answers."""
    futures: list[Future[Any]] = []

    def run(future: Future[Any], each: Any) -> None:
        try:
            future.set_result(work(each))
        except BaseException as error:
            future.set_exception(error)

    for each in given:
        futures.append(Future())
        threading.Thread(target=run, args=(futures[-1], each), daemon=True).start()
    return [future.result(seconds) for future in futures]


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
    run_of(optimizer).settings = run_of(optimizer).settings.model_copy(update=limits)


def engine_of(optimizer: torch.optim.Optimizer) -> Any:
    """What takes the steps, for tests that interrupt one at a certain point: nothing outside shows when to."""
    return optimizer._engine


def run_of(optimizer: torch.optim.Optimizer) -> Any:
    """The worker's place in its run, for tests that let a lease end, or change how patient a worker is."""
    return optimizer._run


def own_server(optimizer: torch.optim.Optimizer) -> LocalServer:
    """The server that an optimizer has started."""
    return optimizer._life._own_server


def local_steps(optimizer: psclient.Outer) -> int:
    """How many were made since the last push."""
    return optimizer._local_steps


def same(one: nn.Module, other: nn.Module) -> bool:
    """Two models have the same bits."""
    return all(torch.equal(mine, its) for mine, its in zip(one.parameters(), other.parameters(), strict=True))


def assert_close(one: nn.Module, other: nn.Module, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    for mine, its in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=rtol, atol=atol)


def assert_same_parameters(model: nn.Module, server: str) -> None:
    """The replica equals the server's model, bit for bit."""
    state = psclient.download(server)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), state[name]), name
