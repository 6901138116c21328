"""Train a CNN on handwritten digits through a parameter server, with DGS and with dense ASGD, and compare the bytes.

Each method gets its own server process and worker processes, all on this machine. The training loop is in
quickstart_worker.py. Results go to runs/quickstart (quick: runs/quickstart-quick): summary.json and curves.png.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

if any(importlib.util.find_spec(name) is None for name in ("sklearn", "matplotlib")):
    sys.exit("the quickstart needs scikit-learn and matplotlib: pip install -c constraints.txt '.[quickstart]'")

import quickstart_display as display
import torch
from quickstart_worker import METHODS, DigitsNet, Done, Job, Progress, load_digits
from quickstart_worker import main as worker_main
from rich.console import Console

import psclient

LEAST_ACCURACY = 0.97  # of DGS
MOST_BYTES = 0.05  # of DGS, as a share of ASGD's

BATCH_SIZE = 32
SERVER_SETTINGS = {"device": "cpu", "buffer_period_steps": 5}  # an epoch has 11 steps: too few for the default of 20
SILENCE_SECONDS = 120.0  # a worker that says nothing for so long is taken for dead
FIRST_SECONDS = 600.0  # the same, until its first step is made: all workers compile loops, once a machine

Workers = dict[Connection, multiprocessing.process.BaseProcess]


class RunFailedError(Exception):
    """A process of the run is lost; the message says which."""


@contextmanager
def started_workers(job: Job) -> Iterator[Workers]:
    """Start the worker processes, each with a pipe to this one; none outlives the block."""
    context = multiprocessing.get_context("spawn")
    workers: Workers = {}
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is for this process to handle
    try:
        for index in range(job.workers):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=worker_main, args=(index, job, sender), name=f"worker-{index}", daemon=True
            )
            process.start()
            sender.close()
            workers[receiver] = process
        signal.signal(signal.SIGINT, on_interrupt)
        yield workers
        for process in workers.values():
            process.join(10.0)
    finally:
        signal.signal(signal.SIGINT, on_interrupt)
        for process in workers.values():
            process.kill()
            process.join()


def news(workers: Workers, server: psclient.LocalServer) -> Iterator[tuple[int, Progress]]:
    """Yield what the workers tell until all are done.

    Raises:
        RunFailedError: the server or a worker ended, or a worker went silent.
    """
    waiting = {pipe: (index, process) for index, (pipe, process) in enumerate(workers.items())}
    deadlines = dict.fromkeys(waiting, time.monotonic() + FIRST_SECONDS)
    while waiting:
        ready = [pipe for pipe in wait(list(waiting), timeout=0.2) if isinstance(pipe, Connection)]
        status = server.processes[0].poll()
        if status is not None:
            raise RunFailedError(f"the server ended early, with status {status}")
        for pipe in ready:
            index, process = waiting[pipe]
            try:
                message = pipe.recv()
            except EOFError:
                process.join(5.0)
                raise RunFailedError(f"{process.name} ended early, with status {process.exitcode}") from None
            deadlines[pipe] = time.monotonic() + SILENCE_SECONDS
            if isinstance(message, Progress):
                yield index, message
            elif isinstance(message, Done):
                del waiting[pipe]
            else:
                raise RunFailedError(f"{process.name} failed:\n{message.rstrip()}")
        for pipe, (_, process) in waiting.items():
            if time.monotonic() > deadlines[pipe]:
                raise RunFailedError(
                    f"{process.name} has said nothing for minutes; where other programs have the machine's cores, try "
                    "again later"
                )


def test_accuracy(server: psclient.LocalServer) -> float:
    """Download the server's model and test it. These bytes are not counted: training does not need them."""
    model = DigitsNet()
    model.load_state_dict(psclient.download(server.addresses, patience_seconds=15.0))
    model.eval()
    images, labels = load_digits()[1].tensors
    with torch.inference_mode():
        correct = (model(images).argmax(1) == labels).sum().item()
    return correct / len(labels)


def run(method: str, options: argparse.Namespace, console: Console) -> tuple[dict[str, Any], display.Curve]:
    """Train with one method from start to end; return the figures and the curve."""
    started = time.monotonic()
    title = f"{method.upper()}, {options.workers} workers"
    last: dict[int, Progress] = {}
    curve: list[tuple[int, float]] = []
    settings = SERVER_SETTINGS | {"device": options.device}
    with display.Display(title, options.workers, console) as shown, psclient.LocalServer(**settings) as server:
        job = Job(method, server.server, options.workers, options.epochs, BATCH_SIZE, options.seed, options.device)

        def evaluate(version: int) -> None:
            curve.append((sum(progress.bytes for progress in last.values()), test_accuracy(server)))
            shown.server(version, curve[-1][1])

        next_evaluation = 0.0
        with started_workers(job) as workers:
            for index, progress in news(workers, server):
                last[index] = progress
                shown.worker(index, progress)
                if len(last) == options.workers and progress.version >= next_evaluation:
                    evaluate(progress.version)
                    next_evaluation = max(progress.version + 4, 1.1 * progress.version)
        version = max(progress.version for progress in last.values())
        evaluate(version)

    def total(name: str) -> int:
        return sum(getattr(progress, name) for progress in last.values())

    result = {
        "test_accuracy": curve[-1][1],
        "steps": total("step"),
        "samples": total("samples"),
        "version": version,
        "push_bytes": total("push_bytes"),
        "pull_bytes": total("pull_bytes"),
        "buffer_bytes": total("buffer_bytes"),
        "bytes": total("bytes"),
        "seconds": round(time.monotonic() - started, 1),
    }
    return result, curve


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes (default: 4; quick: 2)")
    parser.add_argument("--epochs", type=int, metavar="N", help="passes over the data (default: 10; quick: 1)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the weights and the shuffling (default: 0)"
    )
    parser.add_argument("--methods", default="dgs,asgd", metavar="LIST", help="default: dgs,asgd")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default: runs/quickstart (quick: runs/quickstart-quick)"
    )
    parser.add_argument("--device", default="cpu", help="of the server and the workers: cpu or cuda (default: cpu)")
    parser.add_argument("--quick", action="store_true", help="as little as possible; no targets")
    options = parser.parse_args()
    options.out = options.out or Path("runs") / ("quickstart-quick" if options.quick else "quickstart")
    options.workers = options.workers if options.workers is not None else 2 if options.quick else 4
    options.epochs = options.epochs if options.epochs is not None else 1 if options.quick else 10
    options.methods = options.methods.split(",")
    if not set(options.methods) <= set(METHODS):
        parser.error(f"--methods: choose from {', '.join(METHODS)}")
    if not 1 <= options.workers <= len(load_digits()[0]) // BATCH_SIZE:
        parser.error("--workers: each needs at least one batch of the data")
    if options.epochs < 1:
        parser.error("--epochs: at least 1")
    if options.device != "cpu" and not (options.device.startswith("cuda") and torch.cuda.is_available()):
        parser.error(f"--device: {options.device} is not there; choose cpu" + ", or cuda" * torch.cuda.is_available())
    return options


def summary(options: argparse.Namespace, results: dict[str, Any], verdict: dict[str, Any]) -> dict[str, Any]:
    train_set, test_set = load_digits()
    return {
        **results,
        "targets": verdict,
        "bytes_counted": "optimizer.totals of all workers, both ways: pushes (and the first worker's upload of the "
        "model), pulls (first downloads included) and exchanges of BatchNorm statistics (buffer_bytes); bytes is their "
        "sum. Not in it: the exchange when a worker leaves, joins, leases, HTTP/2 framing, downloads for testing",
        "settings": {
            "workers": options.workers,
            "epochs": options.epochs,
            "batch_size": BATCH_SIZE,
            "methods": {name: METHODS[name].keywords for name in results},
            "server": SERVER_SETTINGS | {"device": options.device},
            "parameters": sum(parameter.numel() for parameter in DigitsNet().parameters()),
            "train_samples": len(train_set),
            "test_samples": len(test_set),
        },
        "seed": options.seed,
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count(), "torch": torch.__version__},
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def judge(results: dict[str, Any], quick: bool) -> tuple[dict[str, Any], str]:
    """Compare the results with the targets; return that as data and as a sentence."""
    if "dgs" not in results:
        return {"checked": False}, "DGS did not run, so there is no target."
    accuracy = results["dgs"]["test_accuracy"]
    verdict: dict[str, Any] = {"checked": not quick, "least_accuracy": LEAST_ACCURACY, "most_bytes": MOST_BYTES}
    reached, words = accuracy >= LEAST_ACCURACY, f"DGS: test accuracy {accuracy:.2%}"
    words += " (target: at least 97 %)" * (not quick)
    if "asgd" in results:
        verdict["bytes_ratio"] = ratio = results["dgs"]["bytes"] / results["asgd"]["bytes"]
        reached &= ratio <= MOST_BYTES
        words += f" with {ratio:.2%} of ASGD's bytes" + " (target: at most 5 %)" * (not quick)
    if quick:
        return verdict, f"{words}. A quick run has no targets."
    verdict["reached"] = reached
    return verdict, f"{words}. Targets {'reached' if reached else 'MISSED'}."


def main() -> int:
    options = parse()
    console = Console()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    curves: dict[str, display.Curve] = {}
    try:
        for method in options.methods:
            results[method], curves[method] = run(method, options, console)
    except KeyboardInterrupt:
        print("interrupted; the workers and the server are stopped", file=sys.stderr)
        return 130
    except (RunFailedError, psclient.errors.SparsepsError) as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    verdict, words = judge(results, options.quick)
    options.out.mkdir(parents=True, exist_ok=True)
    written = options.out / "summary.json", options.out / "curves.png"
    written[0].write_text(json.dumps(summary(options, results, verdict), indent=2) + "\n")
    display.plot(curves, written[1])
    console.print(display.final_table(results))
    print(f"wrote {written[0]} and {written[1]}\n{words}")
    return 0 if verdict.get("reached", True) else 1


if __name__ == "__main__":
    sys.exit(main())
