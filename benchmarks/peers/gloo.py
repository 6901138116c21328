"""Peer: a parameter server over gloo, each tensor sent and received by itself, as tutorials write it."""

import os
from collections.abc import Iterable
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from benchmarks.peers.task import CALL_SECONDS, LEARNING_RATE, WORKERS, Job, model_of, train


def server(connection: Connection, job: Job, rendezvous: str) -> None:
    """Take gradients from whoever sends, and answer with the parameters."""
    _join(rendezvous, rank=0)
    parameters = [parameter.detach() for parameter in model_of(job).parameters()]
    gradients = [torch.empty_like(parameter) for parameter in parameters]
    for _ in range(job.exchanges):
        source = dist.recv(gradients[0], tag=0)
        _all(dist.irecv(gradient, source, tag=tag) for tag, gradient in enumerate(gradients) if tag)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(gradient, alpha=LEARNING_RATE)
        _all(dist.isend(parameter, source, tag=tag) for tag, parameter in enumerate(parameters))
    connection.recv()


def worker(connection: Connection, job: Job, rendezvous: str, number: int) -> None:
    _join(rendezvous, rank=1 + number)
    model = model_of(job)
    parameters = list(model.parameters())

    def exchange() -> None:
        _all(dist.isend(_gradient(parameter), 0, tag=tag) for tag, parameter in enumerate(parameters))
        _all(dist.irecv(parameter.detach(), 0, tag=tag) for tag, parameter in enumerate(parameters))

    train(connection, job, number, model, exchange)


def _join(rendezvous: str, rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=CALL_SECONDS)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=1 + WORKERS, timeout=limit)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _all(requests: Iterable[dist.Work | None]) -> None:
    for request in list(requests):  # all under way before the first wait
        assert request is not None
        request.wait()
