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
from rich.console import Console

from benchmarks import ldte, pairs, report
from benchmarks.harness import budgets, machine
from benchmarks.harness.progress import Progress
from benchmarks.harness.section import Plan, Section
from benchmarks.peers import peers
from benchmarks.sections import (
    accuracy,
    codecs,
    memory,
    selection,
    server,
    wire,
)
from benchmarks.workload.layouts import resnet18, resnet50

SECTIONS = {
    module.KEY: module
    for module in (
        selection,
        ldte,
        codecs,
        wire,
        server,
        memory,
        peers,
        accuracy,
        pairs,
    )
}
DEFAULT = [key for key in SECTIONS if key != pairs.KEY]
"""The sections that run where none is named."""

_NARROWEST = 120


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen sections."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    signal.signal(signal.SIGTERM, _end)  # as Ctrl-C does: what was started is stopped, what was set up is taken down
    torch.set_num_threads(options.threads)
    facts = machine.describe(given)
    only = options.only or ([pairs.KEY] if options.base else DEFAULT)
    chosen = [SECTIONS[key] for key in SECTIONS if key in only]
    found: list[Section] = []
    with Progress(len(chosen)) as progress:
        plan = Plan(
            quick=options.quick,
            layout=resnet18() if options.quick else resnet50(),
            layout_name="ResNet-18" if options.quick else "ResNet-50",
            density=options.density,
            rounds=options.rounds or (7 if options.quick else 15),
            slow_rounds=3 if options.quick else 5,
            seed=options.seed,
            say=progress.say,
            base=options.base,
            times=options.times or (2 if options.quick else 10),
        )
        for module in chosen:
            progress.section(module.TITLE)
            started = time.monotonic()
            budget = budgets.seconds(module.KEY, quick=options.quick)
            section = module.run(replace(plan, deadline=started + budget))
            section.seconds, section.budget = time.monotonic() - started, budget
            found.append(section)
    facts["plan"] = {"layout": plan.layout_name, "parameters": plan.layout.size, "density": plan.density}
    console = Console()
    if not console.is_terminal:
        console = Console(width=_NARROWEST)
    report.show(facts, found, console)
    written = ", ".join(str(path) for path in report.write(options.output, facts, found))
    seconds = sum(section.seconds for section in found)
    console.print(f"\n{seconds:.0f} s; written: {written}", markup=False, highlight=False)
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description="Measure sparseps on this machine.")
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer repetitions")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--density", type=float, default=0.01, help="share of a tensor's entries in a push")
    parser.add_argument("--rounds", type=int, default=0, help="repetitions of what is fast")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="torch threads of this process")
    parser.add_argument("--seed", type=int, default=0, help="of the random pushes and gradients")
    parser.add_argument("--base", type=Path, help="root of another checkout to compare this one with, alone")
    parser.add_argument("--times", type=int, default=0, help="how often both are measured, in turn")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="where the report goes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
