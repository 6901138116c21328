"""A primary, its standby, and workers whose every push is counted by the model itself."""

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import psclient
from psclient import LocalServer
from psclient.settings import ClientSettings
from psservice.cli.main import main
from tests.system.tools import wait_until

SECONDS = 60.0
PATIENT = ClientSettings(server="local", deadline_seconds=5, connect_seconds=60, patience_seconds=60, dense_below=0)
FAST = {"lease_seconds": 5.0, "cut_seconds": 0.05}


def counting_model() -> nn.Linear:
    """A model that is zero at first."""
    model = nn.Linear(40, 50)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


class CountingWorker:
    """Pushes a gradient of ones with a rate of one: an entry of the model is minus the number of pushes applied."""

    def __init__(self, server: str, name: str) -> None:
        self.model = counting_model()
        self.optimizer = psclient.ASGD(
            self.model.parameters(),
            lr=1.0,
            model=self.model,
            server=server,
            worker=name,
            settings=PATIENT,
        )
        self.steps = 0

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.steps += 1

    def close(self) -> None:
        self.optimizer.close()


def counted(server: str) -> int:
    """How often the gradient of ones was applied; every entry must agree."""
    state = psclient.download(server)
    values = torch.cat([value.flatten() for value in state.values()])
    assert torch.equal(values, values[:1].expand_as(values)), "entries of different moments"
    return -int(values[0])


class Fleet:
    """Workers that step in threads until they are told to stop."""

    def __init__(self, server: str, count: int) -> None:
        self.workers = [CountingWorker(server, f"w{number}") for number in range(count)]
        self.errors: list[BaseException] = []
        self._stopping = threading.Event()
        self._may_step = threading.Event()
        self._may_step.set()
        self._stepping = [threading.Lock() for _ in self.workers]
        self._threads = [
            threading.Thread(target=self._work, args=each) for each in zip(self.workers, self._stepping, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def steps(self) -> int:
        return sum(worker.steps for worker in self.workers)

    def _work(self, worker: CountingWorker, stepping: threading.Lock) -> None:
        try:
            while not self._stopping.is_set():
                self._may_step.wait()
                with stepping:
                    if self._may_step.is_set():
                        worker.step()
        except BaseException as error:
            self.errors.append(error)

    def go_on(self, steps: int) -> None:
        """Wait until so many more steps are made."""
        end = self.steps + steps
        wait_until(lambda: self.steps >= end or bool(self.errors), SECONDS)
        assert not self.errors, self.errors

    @contextmanager
    def paused(self) -> Iterator[int]:
        """No worker is inside a step during the body, which gets how many were made."""
        self._may_step.clear()
        for each in self._stepping:
            with each:
                pass
        yield self.steps
        self._may_step.set()

    def stop(self) -> int:
        """Stop stepping, push what a refusal has left in a residual, and return the steps, each of which counts now."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(SECONDS)
        assert not self.errors, self.errors
        for worker in self.workers:
            worker.optimizer.flush()
        return self.steps

    def close(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(SECONDS)
        for worker in self.workers:
            worker.close()


@contextmanager
def stepping(server: str, count: int = 2) -> Iterator[Fleet]:
    fleet = Fleet(server, count)
    try:
        yield fleet
    finally:
        fleet.close()


def primary(directory: Path, **settings: Any) -> LocalServer:
    return LocalServer(**{"data_dir": directory / "primary", **FAST, **settings})


def standby(directory: Path, of: LocalServer, **settings: Any) -> LocalServer:
    shards = len(of.addresses)
    return LocalServer(
        **{"shards": shards, "data_dir": directory / "standby", "standby_of": of.server, **FAST, **settings}
    )


def either(*servers: LocalServer) -> str:
    """The addresses of each shard's servers, in the order of the shards."""
    return ",".join("/".join(addresses) for addresses in zip(*(each.addresses for each in servers), strict=True))


def kill(server: LocalServer) -> None:
    for process in server.processes:
        process.send_signal(signal.SIGKILL)
    for process in server.processes:
        process.wait()


def status(server: LocalServer, capsys: Any, index: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["status", "--output=json", server.addresses[index]]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    return found


def follows(server: LocalServer, capsys: Any) -> bool:
    """Whether a standby has everything that this server has."""
    found = status(server, capsys)["replication"]
    return bool(found and found["connected"] and not int(found["behind_bytes"]) and not found["behind_seconds"])
