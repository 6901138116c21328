"""Peer: a parameter server over torch.distributed.rpc: one remote call a step, gradients there, parameters back.

As PyTorch's tutorial on parameter servers with batch updates, asynchronous. TensorPipe is held to TCP, which is what it
has between machines: on one machine it would go through shared memory.
"""

import os
import threading
import warnings
from multiprocessing.connection import Connection

import torch
from torch.distributed import rpc

from benchmarks.peers.task import CALL_SECONDS, LEARNING_RATE, WORKERS, Job, model_of, train

_SERVER = "server"


class _ParameterServer:
    """The parameters, and one step at a time over them."""

    def __init__(self, job: Job) -> None:
        self._parameters = [parameter.detach() for parameter in model_of(job).parameters()]
        self._lock = threading.Lock()

    def update_and_fetch(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        with self._lock:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=LEARNING_RATE)
            return [parameter.clone() for parameter in self._parameters]


_served: list[_ParameterServer] = []
"""In the server's process: the one that remote calls reach."""


def server(connection: Connection, job: Job, rendezvous: str) -> None:
    """Serve until told that it is over."""
    _served.append(_ParameterServer(job))
    _join(rendezvous, _SERVER, rank=0)
    connection.recv()
    rpc.shutdown()


def worker(connection: Connection, job: Job, rendezvous: str, number: int) -> None:
    _join(rendezvous, f"worker-{number}", rank=1 + number)
    model = model_of(job)
    parameters = list(model.parameters())

    def exchange() -> None:
        fetched = rpc.rpc_sync(_SERVER, _update_and_fetch, args=([parameter.grad for parameter in parameters],))
        with torch.no_grad():
            for parameter, value in zip(parameters, fetched, strict=True):
                parameter.copy_(value)

    train(connection, job, number, model, exchange)
    rpc.shutdown()


def _update_and_fetch(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    return _served[0].update_and_fetch(gradients)


def _join(rendezvous: str, name: str, rank: int) -> None:
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=rendezvous, rpc_timeout=CALL_SECONDS, _transports=["uv"], _channels=["basic"]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # init_rpc calls what torch itself has deprecated
        rpc.init_rpc(name, rank=rank, world_size=1 + WORKERS, rpc_backend_options=options)
