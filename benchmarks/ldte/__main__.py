"""``python -m benchmarks.ldte``: the seven networks of the paper on both datasets, into ``runs/ldte``; resumable.

A run of one model on one dataset that is finished is not run again, unless the options are others.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import ldte, report
from benchmarks.harness import machine
from benchmarks.harness.progress import Progress
from benchmarks.ldte import pictures
from benchmarks.ldte.runs import Job, run_once
from benchmarks.ldte.tables import DATASETS, NAMES
from benchmarks.report import guide
from benchmarks.report.markdown import markdown


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not done yet, and report."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    if options.threads:
        torch.set_num_threads(options.threads)
    facts = machine.describe(given) | {"command": " ".join(["python -m benchmarks.ldte", *given])}
    options.output.mkdir(parents=True, exist_ok=True)
    jobs = [
        Job(dataset, model, options.data, options.batch_size, options.steps, options.seed, rounds)
        for dataset, rounds in zip(options.datasets, (options.rounds, *[0] * len(options.datasets)), strict=False)
        for model in options.models
    ]
    started = time.monotonic()
    results = []
    try:
        with Progress(len(jobs)) as progress:
            for job in jobs:
                progress.section(f"{NAMES.get(job.model, job.model)}, {DATASETS[job.dataset]}")
                results.append(run_once(job, options.output, progress.say))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except (FileNotFoundError, ModuleNotFoundError, ValueError) as error:
        print(f"benchmarks.ldte: {error}", file=sys.stderr)
        return 1
    section = ldte.section(results)
    section.seconds = facts["seconds"] = time.monotonic() - started
    console = Console()
    report.show(facts, [section], console if console.is_terminal else Console(width=160))
    written = [*report.write(options.output, facts, [section]), *pictures.draw(options.output, results)]
    if options.page is not None:
        drawn = pictures.draw(options.page.parent, results)
        text = markdown(facts, [section]).partition("\n\n")[2]  # without the report's head line
        guide.into_page(options.page, text.replace("## 1. ", "### "), drawn)
        written += [options.page, *drawn]
    (options.output / "ldte.json").write_text(json.dumps(facts | {"results": [r.plain() for r in results]}))
    console.print(f"\n{section.seconds:.0f} s; written: {', '.join(map(str, written))}", markup=False, highlight=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ldte", description=__doc__)
    parser.add_argument("--data", type=Path, metavar="DATA", help="folder of CIFAR; default: digits in its format")
    parser.add_argument(
        "--models",
        nargs="+",
        default=list(NAMES),
        metavar="NAME",
        help=f"{', '.join(NAMES)}, or another of torchvision",
    )
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=list(DATASETS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=16, help="of each run (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="of timing, on the first dataset; 0 for none")
    parser.add_argument("--threads", type=int, default=0, help="torch threads (default: as OMP_NUM_THREADS says)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/ldte"), metavar="DIR")
    parser.add_argument("--page", type=guide.page, metavar="FILE", help="a page to put tables and pictures into")
    return parser


if __name__ == "__main__":
    sys.exit(main())
