"""One worker of the quickstart: the data, the model, and a training loop with three lines of psclient in it."""

import functools
import logging
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psclient  # first changed line

TEST_SAMPLES = 360

# DGS's momentum makes every step 1 / (1 - 0.7) times as long, so both methods learn at the same rate.
METHODS = {
    "dgs": functools.partial(psclient.DGS, lr=0.03, momentum=0.7, budget=0.03),
    "asgd": functools.partial(psclient.ASGD, lr=0.1),
}


@dataclass(frozen=True)
class Job:
    """What the workers of one run have in common."""

    method: str
    server: str
    workers: int
    epochs: int
    batch_size: int
    seed: int
    device: str = "cpu"


@dataclass(frozen=True)
class Progress:
    """What a worker tells of after a step; the bytes are sums since the start."""

    step: int
    steps: int
    samples: int
    loss: float
    accuracy: float
    version: int
    staleness: int
    push_bytes: int
    pull_bytes: int
    buffer_bytes: int

    @property
    def bytes(self) -> int:
        """Everything that this worker has sent and received."""
        return self.push_bytes + self.pull_bytes + self.buffer_bytes


@dataclass(frozen=True)
class Done:
    """A worker's last word."""


class DigitsNet(nn.Sequential):
    """A CNN with BatchNorm for 8 x 8 grey images; 620,266 parameters."""

    def __init__(self) -> None:
        norm2d = functools.partial(nn.BatchNorm2d, momentum=0.3)  # running statistics that keep up with a short run
        norm1d = functools.partial(nn.BatchNorm1d, momentum=0.3)
        super().__init__(
            *(nn.Conv2d(1, 32, 3, padding=1, bias=False), norm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, padding=1, bias=False), norm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(64, 128, 3, padding=1, bias=False), norm2d(128), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(128 * 4 * 4, 256, bias=False), norm1d(256), nn.ReLU()),
            nn.Linear(256, 10),
        )


@functools.cache
def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's 1,797 handwritten digits: 1,437 for training and 360 for testing, always the same."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.from_numpy(images).float().view(-1, 1, 8, 8)[order] / 16
    y = torch.from_numpy(labels).long()[order]
    return TensorDataset(x[TEST_SAMPLES:], y[TEST_SAMPLES:]), TensorDataset(x[:TEST_SAMPLES], y[:TEST_SAMPLES])


def train(index: int, job: Job, tell: Callable[[Progress], None]) -> None:
    """Train on this worker's share of the data and tell of each step."""
    torch.set_num_threads(1)  # the workers share the cores
    if index:  # the first worker's warnings are all workers'
        logging.getLogger("psclient").setLevel(logging.ERROR)
    torch.manual_seed(job.seed)
    images, labels = (tensor.to(job.device) for tensor in load_digits()[0].tensors)
    share = TensorDataset(images[index :: job.workers], labels[index :: job.workers])
    shuffle = torch.Generator().manual_seed(1000 * job.seed + index)
    loader = DataLoader(share, job.batch_size, shuffle=True, drop_last=True, generator=shuffle)
    steps = job.epochs * len(loader)
    model = DigitsNet().to(job.device)

    # Second changed line: instead of torch.optim.SGD(model.parameters(), lr=...).
    optimizer = METHODS[job.method](
        model.parameters(),
        model=model,
        server=job.server,
        worker=f"worker-{index}",
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    step = 0
    model.train()
    for _ in range(job.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            scores = model(inputs)
            loss = nn.functional.cross_entropy(scores, targets)
            loss.backward()
            optimizer.step()
            schedule.step()

            step += 1
            totals = optimizer.totals
            tell(
                Progress(
                    step=step,
                    steps=steps,
                    samples=totals.samples,
                    loss=loss.item(),
                    accuracy=(scores.argmax(1) == targets).float().mean().item(),
                    version=optimizer.version,
                    staleness=optimizer.report.staleness,
                    push_bytes=totals.push_bytes + totals.upload_bytes,
                    pull_bytes=totals.pull_bytes,
                    buffer_bytes=totals.buffer_bytes,
                )
            )
    optimizer.close()  # third changed line: hand in the last BatchNorm statistics and leave


def main(index: int, job: Job, parent: Connection) -> None:
    """Run :func:`train` in a process of its own; the parent is told how it ended."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        train(index, job, parent.send)
        parent.send(Done())
    except Exception:
        parent.send(traceback.format_exc())


def _end_with_parent() -> None:
    """Leave no worker behind where the parent was killed."""
    process = multiprocessing.parent_process()
    if process is not None:
        process.join()
        os._exit(1)
