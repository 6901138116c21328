"""Synchronous, pipelined training (MGS-SGD as published): an iteration's parts by which tensors travel together.

``python -m benchmarks.mgs.pipeline --workers 2 4 --startup-ms 1 5``: worker processes train CIFAR-10's VGG-16 on noise
with SSGD, each behind a slow link of its own. Every plan is taken in turn, with the push during backward and after it.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
from rich.console import Console

import psclient
from benchmarks import report
from benchmarks.harness import machine
from benchmarks.harness.children import Child
from benchmarks.harness.section import Section, Table
from benchmarks.mgs.models import make_cifar_vgg16
from benchmarks.mgs.runs import RULES
from benchmarks.mgs.slowlink import slow_link
from psclient.settings import ClientSettings

_GIGABIT = 125e6  # bytes a second
_WARM_STEPS = 12  # cold steps, probes and a plan
_PARTS = ("forward", "backward", "waited")
_SECONDS = 1800.0
_NAMES = {"layers": "every tensor", "buckets": "25 MB buckets", "greedy": "the paper's greedy", "pareto": "exact"}

Case = tuple[str, bool]
"""A rule, and whether the push goes on during backward."""


def work(
    connection: Connection, server: str, number: int, workers: int, startup: float, rounds: int, batch: int
) -> None:
    """Train as one worker; send the seconds of each part by case, and the number of groups by rule."""
    torch.manual_seed(0)
    model = make_cifar_vgg16()
    generator = torch.Generator().manual_seed(number)
    with slow_link(server, startup, _GIGABIT) as address:
        settings = ClientSettings(
            server=address, worker=f"w{number}", merge="pareto", deadline_seconds=120, patience_seconds=600
        )
        rounds_of_all = psclient.Rounds(start_workers=workers)
        with psclient.SSGD(
            model.parameters(), 1e-3, density=0.01, model=model, overlap=True, rounds=rounds_of_all, settings=settings
        ) as optimizer:

            def step(*, pipelined: bool = True) -> list[float]:
                x = torch.randn(batch, 3, 32, 32, generator=generator)
                y = torch.randint(10, (batch,), generator=generator)
                optimizer.zero_grad()
                moments = [time.perf_counter()]
                loss = torch.nn.functional.cross_entropy(model(x), y)
                moments.append(time.perf_counter())
                with nullcontext() if pipelined else optimizer.accumulating():
                    loss.backward()
                moments.append(time.perf_counter())
                optimizer.step()
                moments.append(time.perf_counter())
                return [end - start for start, end in pairwise(moments)]

            for _ in range(_WARM_STEPS):
                step()
            planner = optimizer._worker.planner
            groups = {rule: planner.groups_by(rule) for rule in RULES}
            found: dict[Case, list[list[float]]] = {}
            for turn in range(1 + rounds):
                for rule, pipelined in _cases():
                    planner.adopt(groups[rule], rule)
                    planner.advance()
                    seconds = step(pipelined=pipelined)
                    if turn:
                        found.setdefault((rule, pipelined), []).append(seconds)
            connection.send((found, {rule: len(each) for rule, each in groups.items()}))


def measure(workers: int, startup: float, rounds: int, batch: int) -> Table:
    """Run some workers, and make a table of their medians over steps and workers."""
    with psclient.LocalServer(buffers="none", down_mode="exact") as server:
        arguments = (workers, startup, rounds, batch)
        children = [Child(f"worker {n}", work, server.server, n, *arguments) for n in range(workers)]
        try:
            heard = [child.hear(_SECONDS) for child in children]
        finally:
            for child in children:
                child.__exit__(None, None, None)
    rows = []
    in_line: dict[str, float] = {}
    for rule, pipelined in _cases():
        steps = [each for found, _ in heard for each in found[rule, pipelined]]
        parts = [median(part) for part in zip(*steps, strict=True)]
        whole = median(sum(each) for each in steps)
        in_line.setdefault(rule, parts[-1])
        counts = sorted({counts[rule] for _, counts in heard})
        rows.append(
            (
                _NAMES[rule],
                "–".join(str(count) for count in (counts[0], counts[-1])[: len(counts)]),
                "during backward" if pipelined else "after it",
                *(f"{part * 1e3:.0f}" for part in parts),
                f"{(in_line[rule] - parts[-1]) * 1e3:.0f}" if pipelined else "",
                f"{whole * 1e3:.0f}",
            )
        )
    heads = ("plan", "groups", "push", *_PARTS, "hidden", "iteration")
    return Table(f"{workers} workers, {startup * 1e3:g} ms a message; ms", heads, rows)


def _cases() -> Iterator[Case]:
    return ((rule, pipelined) for rule in RULES for pipelined in (False, True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each number of workers on each link, and write the report."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mgs.pipeline", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--startup-ms", type=float, nargs="+", default=[1.0, 5.0], help="milliseconds a message")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--output", type=Path, default=Path("runs/pipeline"))
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    facts = machine.describe(given)
    facts["command"] = "python -m benchmarks.mgs.pipeline " + " ".join(given)
    made, started = Section("pipeline", "Synchronous and pipelined (MGS-SGD)"), time.monotonic()
    made.notes.append(
        "Waited: step(), from the end of backward until the round's mean is in the parameters. Hidden: what step() "
        "waits where the push begins after backward, less what it waits where the push goes on during backward. "
        "Medians over steps and workers; each worker has plans of its own, from its own costs, made once."
    )
    console = Console(width=160)
    for workers in options.workers:
        for startup in options.startup_ms:
            made.tables.append(measure(workers, startup / 1e3, options.rounds, options.batch))
            report.show(facts, [made], console)
    made.seconds = time.monotonic() - started
    report.write(options.output, facts, [made])
    return 0


if __name__ == "__main__":
    sys.exit(main())
