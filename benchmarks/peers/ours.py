"""The same job through this project: a psservice process and psclient's optimizers, dense and sparse."""

from multiprocessing.connection import Connection

import psclient
from benchmarks.peers.task import CALL_SECONDS, LEARNING_RATE, Job, model_of, train
from psclient.settings import ClientSettings

_MOMENTUM = 0.7


def worker(connection: Connection, job: Job, address: str, method: str, density: float, number: int) -> None:
    """Train with ASGD, or with DGS at a learning rate that makes the same steps once its momentum has built up."""
    model = model_of(job)
    settings = ClientSettings(
        server=address, worker=f"worker-{number}", deadline_seconds=CALL_SECONDS, patience_seconds=CALL_SECONDS
    )
    optimizer: psclient.ASGD | psclient.DGS
    if method == "asgd":
        optimizer = psclient.ASGD(model.parameters(), lr=LEARNING_RATE, model=model, settings=settings)
    else:
        optimizer = psclient.DGS(
            model.parameters(),
            lr=LEARNING_RATE * (1 - _MOMENTUM),
            momentum=_MOMENTUM,
            density=density,
            model=model,
            settings=settings,
        )
    with optimizer:
        train(connection, job, number, model, optimizer.step)
