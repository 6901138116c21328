"""``python -m benchmarks.bench``: measure, print the report, write it to ``runs/bench``."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch

from benchmarks import pairs
from benchmarks.harness import machine, report
from benchmarks.harness.progress import Progress
from benchmarks.harness.section import Plan, Section
from benchmarks.peers import peers
from benchmarks.sections import accuracy, codecs, feed, fleet, memory, readers, selection, server, tables, wire
from benchmarks.workload.layouts import resnet18, resnet50

SECTIONS = {
    module.KEY: module
    for module in (selection, codecs, wire, server, readers, feed, fleet, memory, tables, peers, accuracy, pairs)
}

BUDGETS = {
    "selection": (12, 190),
    "bytes": (9, 60),
    "wire": (6, 20),
    "server": (8, 90),
    "readers": (24, 150),
    "feed": (12, 425),
    "fleet": (16, 200),
    "memory": (10, 100),
    "tables": (8, 150),
    "peers": (13, 100),
    "accuracy": (1, 315),
    "base": (240, 3600),
}
"""Seconds of each section, quick and in full. A section repeats and goes on to more points only while they last."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen sections."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    signal.signal(signal.SIGTERM, _end)  # as Ctrl-C does: what was started is stopped, what was set up is taken down
    torch.set_num_threads(os.cpu_count() or 1)
    facts = machine.describe("benchmarks.bench", given)
    only = options.only or ([pairs.KEY] if options.base else [key for key in SECTIONS if key != pairs.KEY])
    chosen = [SECTIONS[key] for key in SECTIONS if key in only]
    found: list[Section] = []
    with Progress(len(chosen)) as progress:
        plan = Plan(
            quick=options.quick,
            layout=resnet18() if options.quick else resnet50(),
            layout_name="ResNet-18" if options.quick else "ResNet-50",
            density=0.01,
            rounds=7 if options.quick else 15,
            slow_rounds=3 if options.quick else 5,
            seed=0,
            say=progress.say,
            base=options.base,
            times=options.times or (2 if options.quick else 10),
        )
        for module in chosen:
            progress.section(module.TITLE)
            started = time.monotonic()
            budget = BUDGETS[module.KEY][0 if options.quick else 1]
            section = module.run(replace(plan, deadline=started + budget))
            section.seconds = time.monotonic() - started
            found.append(section)
    facts["plan"] = {"layout": plan.layout_name, "parameters": plan.layout.size, "density": plan.density}
    report.show(report.write(options.output, "Benchmarks", facts, found), sum(section.seconds for section in found))
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description="Measure sparseps on this machine.")
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer repetitions")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--base", type=Path, help="root of another checkout to compare this one with, alone")
    parser.add_argument("--times", type=int, default=0, help="how often both are measured, in turn")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="where the report goes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
