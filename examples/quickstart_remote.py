"""One worker of the quickstart, on a server that runs already: in a container, in a pod, on another machine.

Start it once a worker, each with its number: --worker, or JOB_COMPLETION_INDEX in an indexed Job of Kubernetes. Worker
0 tests the server's model at the end and exits with status 1 if it misses the target.
"""

import argparse
import os
import sys
import time

import torch
from quickstart_worker import METHODS, DigitsNet, Job, Progress, load_digits, train

import psclient

LEAST_ACCURACY = 0.97
BATCH_SIZE = 32
POLL_SECONDS = 1.0


def test_accuracy(server: str) -> float:
    """Download the server's model and test it."""
    model = DigitsNet()
    model.load_state_dict(psclient.download(server, patience_seconds=60.0))
    model.eval()
    images, labels = load_digits()[1].tensors
    with torch.inference_mode():
        return (model(images).argmax(1) == labels).float().mean().item()


def await_accuracy(server: str, patience_seconds: float) -> float:
    """Test until the target is reached: this worker is done, others may not be. Return the last accuracy."""
    end = time.monotonic() + patience_seconds
    while (accuracy := test_accuracy(server)) < LEAST_ACCURACY and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    return accuracy


def parse() -> argparse.Namespace:
    environment = os.environ.get
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", metavar="HOST:PORT", help="each shard in order, with commas (PSCLIENT_SERVER)")
    parser.add_argument("--worker", type=int, metavar="I", help="this worker's number, from 0 (JOB_COMPLETION_INDEX)")
    parser.add_argument("--workers", type=int, metavar="N", help="how many there are (WORLD_SIZE; default: 2)")
    parser.add_argument("--epochs", type=int, default=10, metavar="N", help="passes over the data (default: 10)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and shuffling (default: 0)")
    parser.add_argument("--method", default="dgs", choices=METHODS, help="default: %(default)s")
    parser.add_argument(
        "--patience",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="how long worker 0 waits for the others to reach the target with it (default: 120)",
    )
    parser.set_defaults(
        server=environment("PSCLIENT_SERVER"),
        worker=environment("JOB_COMPLETION_INDEX"),
        workers=environment("WORLD_SIZE", "2"),
    )
    options = parser.parse_args()
    if not options.server:
        parser.error("no server: give --server HOST:PORT or set PSCLIENT_SERVER")
    if options.worker is None:
        parser.error("which worker is this? Give --worker, or run it in an indexed Job")
    if not 1 <= options.workers <= len(load_digits()[0]) // BATCH_SIZE:
        parser.error("--workers: each needs at least one batch of the data")
    if not 0 <= options.worker < options.workers:
        parser.error(f"--worker: from 0 to {options.workers - 1}, for --workers {options.workers}")
    if options.epochs < 1:
        parser.error("--epochs: at least 1")
    return options


def main() -> int:
    options = parse()
    job = Job(options.method, options.server, options.workers, options.epochs, BATCH_SIZE, options.seed)

    def tell(progress: Progress) -> None:
        if progress.step % (progress.steps // options.epochs) == 0:
            print(
                f"worker {options.worker}: step {progress.step} of {progress.steps}, loss {progress.loss:.3f}, "
                f"version {progress.version}, {progress.bytes / 1e6:.2f} MB sent and received",
                flush=True,
            )

    try:
        train(options.worker, job, tell)
        if options.worker != 0:
            return 0
        accuracy = await_accuracy(options.server, options.patience)
    except psclient.errors.SparsepsError as error:
        print(f"quickstart_remote: {error}", file=sys.stderr)
        return 1
    reached = accuracy >= LEAST_ACCURACY
    print(f"test accuracy of the server's model: {accuracy:.2%}; target {'reached' if reached else 'MISSED'} (97 %)")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
