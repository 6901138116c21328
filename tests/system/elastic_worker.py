"""A worker process on elastic data. It writes each batch down before its step, and that the step has ended after it.

``python -m tests.system.elastic_worker SERVER NAME SAMPLES EPOCHS PAUSE_SECONDS BOOK``; begins at a line on stdin.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import psclient
from tests.system.tools import QUICK, make_data, make_model, train_step


def main(server: str, name: str, samples: str, epochs: str, pause_seconds: str, book: str) -> None:
    torch.set_num_threads(1)
    x, y = make_data(count=int(samples))
    dataset = TensorDataset(x, y, torch.arange(len(x)))
    model = make_model(batch_norm=False)
    with Path(book).open("w", buffering=1) as lines:
        print("ready", file=lines)
        sys.stdin.readline()
        with psclient.ASGD(
            model.parameters(), lr=0.01, model=model, server=server, worker=name, settings=QUICK
        ) as optimizer:
            sampler = psclient.ElasticSampler(dataset, optimizer, lease_samples=64)
            loader = DataLoader(dataset, batch_size=8, sampler=sampler)
            for _ in sampler.epochs(int(epochs)):
                for inputs, targets, index in loader:
                    time.sleep(float(pause_seconds))  # how slow this machine is
                    print(json.dumps(["try", sampler.epoch, index.tolist()]), file=lines)
                    train_step(model, optimizer, inputs, targets)
                    print(json.dumps(["done"]), file=lines)
        print("left", file=lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
