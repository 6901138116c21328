"""``python -m benchmarks.evidence``: run what the journal has not yet, and report; call it again to go on."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.campaign import command, fetch
from benchmarks.campaign.comparison import Comparison, Entrant, Stage
from benchmarks.campaign.execute import execute
from benchmarks.campaign.ledger import Ledger
from benchmarks.campaign.methods import METHODS
from benchmarks.campaign.progress import Progress
from benchmarks.campaign.tasks import TASKS
from benchmarks.evidence import curves, report
from benchmarks.evidence.stages import FORMS, QUICK, SAMPLES, SMOKE, WORKERS, full


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is not done yet, and report after each stage; 0 if nothing failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options = parser.parse_args(given)
    if options.text is not None and not options.text.is_file():
        parser.error(f"--text: there is no file {options.text}")
    stages = _stages(options)
    if options.text is not None:
        fetch.text(options.text)
    if not options.report:
        for task in {stage.task for stage in stages}:
            TASKS[task].source()  # fetched here, once, and not in each process

    def make(ledger: Ledger, progress: Progress) -> tuple[Comparison, command.Report, Callable[[command.Tell], None]]:
        evidence = Comparison(ledger, progress, None if options.report else execute)
        told = command.Report(
            lambda facts: report.markdown(facts, evidence), draw=lambda folder: curves.draw(folder, evidence.runs)
        )
        return evidence, told, lambda tell: evidence.run(stages, tell)

    return command.run(options, given, make)


def _stages(options: argparse.Namespace) -> list[Stage]:
    def chosen(entrants: Sequence[Entrant]) -> tuple[Entrant, ...]:
        return tuple(
            each
            for each in entrants
            if each.method in (options.methods or (each.method,)) and each.form in (options.forms or (each.form,))
        )

    return [
        replace(
            stage,
            entrants=chosen(stage.entrants),
            seeds=tuple(options.seeds or stage.seeds),
            momenta=1 if options.rates_only else stage.momenta,
            rate=options.rate or stage.rate,
            samples=options.samples or stage.samples,
        )
        for stage in (SMOKE if options.smoke else QUICK if options.quick else full())
        if stage.task in (options.tasks or SAMPLES)
        and stage.workers in (options.workers or (stage.workers,))
        and chosen(stage.entrants)
        and (options.only is None or stage.simulated == (options.only == "simulated"))
    ]


def _parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "evidence",
        "Does sparse both ways cost accuracy?",
        "ten minutes: one small task, 4 workers, 2 seeds",
        "seconds: whether it runs, simulated and real",
    )
    parser.add_argument("--only", choices=("simulated", "real"), help="one kind of runs")
    parser.add_argument("--tasks", nargs="+", choices=SAMPLES, metavar="TASK", help=", ".join(SAMPLES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--forms", nargs="+", choices=FORMS, metavar="FORM", help="; ".join(FORMS).replace("%", "%%"))
    parser.add_argument("--workers", nargs="+", type=int, choices=WORKERS, metavar="N", help="numbers of workers")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="seeds of the runs that count")
    parser.add_argument("--rates-only", action="store_true", help="search no momentum")
    parser.add_argument(
        "--rate", type=float, metavar="R", help="effective learning rate of all runs, in place of a search"
    )
    parser.add_argument("--samples", type=int, metavar="N", help="of all workers together, in place of the task's")
    parser.add_argument("--text", type=Path, metavar="FILE", help="a plain text in the place of the fetched English")
    return parser


if __name__ == "__main__":
    sys.exit(main())
