"""The command of a campaign: do what the journal has not yet, and report after each stage; called again it goes on."""

import argparse
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.campaign.comparison import Stage
from benchmarks.campaign.journal import Journal
from benchmarks.campaign.methods import METHODS
from benchmarks.harness import machine, report
from benchmarks.harness.progress import Progress
from benchmarks.harness.section import Section
from verify.cluster.servers import end_on_sigterm

Work = Callable[[Callable[[], object]], None]
"""Does everything; is given what to call if there is something new to report."""


_KEPT = Path("docs/evidence/journals")
"""In the repository: runs that its figures rest on, a file a campaign."""
_ROOT = Path(__file__).parents[2]


def parser(name: str, what: str, quick: str, smoke: str) -> argparse.ArgumentParser:
    """Return a parser with what every campaign is asked."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=f"{what} What is in the journal is not run again."
    )
    made.set_defaults(campaign=name)
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--smoke", action="store_true", help=smoke)
    made.add_argument("--report", action="store_true", help="report what the journal has, and run nothing")
    made.add_argument("--keep", action="store_true", help=f"add the runs to the repository's: {_KEPT / name}.jsonl")
    made.add_argument("--output", type=Path, default=Path("runs") / name, metavar="DIR", help="default: %(default)s")
    return made


def add_choices(made: argparse.ArgumentParser, tasks: Collection[str], forms: Collection[str]) -> None:
    """Add options that choose a part of the stages."""
    for name, choices in (("tasks", tasks), ("methods", METHODS), ("forms", forms)):
        words = "; ".join(choices).replace("%", "%%")
        made.add_argument(f"--{name}", nargs="+", choices=choices, metavar=name[:-1].upper(), help=words)
    made.add_argument("--workers", nargs="+", type=int, metavar="N", help="numbers of workers")
    made.add_argument("--seeds", nargs="+", type=int, metavar="N", help="seeds of the runs that count")
    made.add_argument("--samples", type=int, metavar="N", help="of all workers together, in place of the task's")
    made.add_argument("--rate", type=float, metavar="R", help="effective rate of all runs, in place of a search")


def chosen(stages: Iterable[Stage], options: argparse.Namespace) -> list[Stage]:
    """Return the stages as the options of :func:`add_choices` say."""
    found = [
        replace(
            stage,
            entrants=tuple(
                entrant
                for entrant in stage.entrants
                if entrant.method in (options.methods or (entrant.method,))
                and entrant.form in (options.forms or (entrant.form,))
            ),
            seeds=tuple(options.seeds or stage.seeds),
            rate=options.rate or stage.rate,
            samples=options.samples or stage.samples,
        )
        for stage in stages
        if stage.task in (options.tasks or (stage.task,)) and stage.workers in (options.workers or (stage.workers,))
    ]
    return [stage for stage in found if stage.entrants]


def run(
    options: argparse.Namespace,
    given: Sequence[str],
    make: Callable[[Journal], tuple[Work, Callable[[], list[Section]]]],
) -> int:
    """Run a campaign and write its report; return 0 if nothing failed, 130 if it was interrupted.

    Args:
        options: those of :func:`parser`.
        given: the command line.
        make: returns the work, and what returns its report so far.
    """
    end_on_sigterm()  # as Ctrl-C does: what was started is stopped
    torch.set_num_threads(1)  # models are tested alike on every machine
    facts, started = machine.describe(f"benchmarks.{options.campaign}", given), time.monotonic()
    with Progress() as progress:
        kept = _ROOT / _KEPT / f"{options.campaign}.jsonl"
        journal = Journal(options.output / "journal.jsonl", progress, does=not options.report, kept=kept)
        work, sections = make(journal)

        def write() -> list[Path]:
            found = sections()
            runs = ", ".join(f"{name} ({count})" for name, count in journal.commits.items())
            found[-1].notes += [f"Runs, by commit: {runs}."] if runs else []
            found[-1].notes += [f"FAILED: {failure}" for failure in journal.failures]
            return report.write(options.output, options.campaign.capitalize(), facts, found)

        try:
            work((lambda: None) if options.report else write)
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from here", file=sys.stderr)
            return 130
    report.show(write(), time.monotonic() - started)
    if options.keep:
        journal.keep()
    return 1 if journal.failures else 0
