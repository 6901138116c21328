"""RMSprop and StepLR on the server: workers push gradients, sparse or dense, and keep no optimizer state of their own.

Trains the digits of scikit-learn with a server and worker processes on this machine, and tests the server's model.
"""

import argparse
import multiprocessing

import torch
from quickstart_worker import DigitsNet, load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psclient

BATCH_SIZE = 32


def train(worker: int, workers: int, epochs: int, budget: float, server: str) -> None:
    torch.set_num_threads(1)  # the workers share the cores
    torch.manual_seed(0)
    images, labels = load_digits()[0].tensors
    share = TensorDataset(images[worker::workers], labels[worker::workers])
    loader = DataLoader(share, BATCH_SIZE, shuffle=True, drop_last=True)
    model = DigitsNet()
    versions = epochs * len(loader) * workers
    optimizer = psclient.ServerOptimizer(
        model.parameters(),
        "RMSprop",
        {"lr": 0.002},
        scheduler=("StepLR", {"step_size": max(1, versions // 3), "gamma": 0.3}),  # counted in pushes of all workers
        budget=budget,
        model=model,
        server=server,
        worker=f"worker-{worker}",
    )
    for epoch in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        print(f"worker {worker}: epoch {epoch + 1} of {epochs}, loss {loss.item():.3f}, version {optimizer.version}")
    optimizer.close()


def test_accuracy(server: str) -> float:
    model = DigitsNet()
    model.load_state_dict(psclient.download(server))
    model.eval()
    images, labels = load_digits()[1].tensors
    with torch.inference_mode():
        return (model(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="worker processes (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=6, metavar="N", help="passes (default: %(default)s)")
    parser.add_argument(
        "--budget",
        type=float,
        default=0.03,
        metavar="SHARE",
        help="of the dense bytes, each way (default: %(default)s)",
    )
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with psclient.LocalServer(buffer_period_steps=5) as server:
        shared = (options.workers, options.epochs, options.budget, server.server)
        workers = [context.Process(target=train, args=(worker, *shared)) for worker in range(options.workers)]
        for process in workers:
            process.start()
        for process in workers:
            process.join()
        if any(process.exitcode for process in workers):
            raise SystemExit("a worker failed; its message is above")
        print(f"test accuracy of the server's model: {test_accuracy(server.server):.2%}")


if __name__ == "__main__":
    main()
