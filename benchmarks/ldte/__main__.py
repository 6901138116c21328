"""``python -m benchmarks.ldte``: the seven networks of the paper on both datasets, into ``runs/ldte``; resumable."""

import argparse
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.campaign.journal import Journal
from benchmarks.harness import machine, report
from benchmarks.harness.progress import Progress
from benchmarks.ldte import tables
from benchmarks.ldte.runs import Job, Result, run
from benchmarks.ldte.tables import DATASETS, NAMES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not done yet, and report."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    facts, started = machine.describe("benchmarks.ldte", given), time.monotonic()
    jobs = [
        Job(dataset, model, options.data, options.batch_size, options.steps, rounds)
        for dataset, rounds in zip(DATASETS, (options.rounds, 0), strict=True)
        for model in options.models
    ]
    results = []
    try:
        with Progress(len(jobs)) as progress:
            journal = Journal(options.output / "journal.jsonl", progress)
            for job in jobs:
                progress.section(f"{NAMES.get(job.model, job.model)}, {DATASETS[job.dataset]}")
                do = functools.partial(run, job, options.output / "data", progress.say)
                found = journal.once(str(job), "train", 0.0, lambda do=do: do().plain())  # type: ignore[misc]
                if found is not None:
                    results.append(Result.read(job, found))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except (FileNotFoundError, ModuleNotFoundError, ValueError) as error:
        print(f"benchmarks.ldte: {error}", file=sys.stderr)
        return 1
    written = report.write(options.output, "LDTE", facts, [tables.section(results)])
    report.show(written, time.monotonic() - started)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ldte", description=__doc__)
    parser.add_argument("--data", type=Path, metavar="DATA", help="folder of CIFAR; default: digits in its format")
    models = f"{', '.join(NAMES)}, or another of torchvision"
    parser.add_argument("--models", nargs="+", default=list(NAMES), metavar="NAME", help=models)
    parser.add_argument("--steps", type=int, default=16, help="of each run (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="of timing, on the first dataset; 0 for none")
    parser.add_argument("--output", type=Path, default=Path("runs/ldte"), metavar="DIR")
    return parser


if __name__ == "__main__":
    sys.exit(main())
