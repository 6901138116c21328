"""A script that is launched as the training scripts are; what its workers do is said by MODE."""

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import torch
from support import launch

import psclient


def train(options: argparse.Namespace, place: launch.Place) -> None:
    mode = os.environ["MODE"]
    if mode == "fail at once":
        raise ValueError("no worker can")
    model = torch.nn.Linear(8, 2)
    with psclient.DGS(model.parameters(), lr=0.1, model=model, server=place.server, worker=place.worker) as optimizer:
        (place.out / f"{optimizer.worker}.{mode}").write_text(f"{os.getpid()} {place.index} {place.workers}")
        if mode == "fail" and place.index == 1:
            raise ValueError("this worker cannot")
        while True:
            optimizer.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            (place.out / f"version-{place.index}").write_text(str(optimizer.version))
            if mode in ("steps", "fail") and optimizer.version >= 5:
                return
            time.sleep(0.01)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser, out="out")
    sys.exit(launch.run(train, parser.parse_args()))
