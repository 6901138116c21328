"""``python -m benchmarks.evidence``: run what the journal has not yet, and report; call it again to go on."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.compare.execute import execute
from benchmarks.compare.ledger import Ledger
from benchmarks.compare.methods import METHODS
from benchmarks.compare.progress import Progress
from benchmarks.compare.tasks import TASKS
from benchmarks.evidence import curves, fetch, report
from benchmarks.evidence.evidence import Evidence
from benchmarks.evidence.stages import FORMS, QUICK, SAMPLES, SMOKE, WORKERS, Entrant, Stage, full
from benchmarks.harness import machine
from benchmarks.report import guide
from verify.cluster.servers import end_on_sigterm


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is not done yet, and report after each stage; 0 where nothing failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options = parser.parse_args(given)
    if options.text is not None and not options.text.is_file():
        parser.error(f"--text: there is no file {options.text}")
    end_on_sigterm()  # as Ctrl-C does: what was started is stopped
    facts = machine.describe(given) | {"command": f"python -m benchmarks.evidence {shlex.join(given)}"}
    stages = _stages(options)
    if options.text is not None:
        fetch.text(options.text)
    if not options.report:
        for task in {stage.task for stage in stages}:
            TASKS[task].source()  # fetched here, once, and not in each process
    with Progress() as progress:
        evidence = Evidence(Ledger(options.output / "journal.jsonl"), progress, None if options.report else execute)

        def write() -> None:
            if evidence.runs:
                text = report.markdown(facts, evidence)
                (options.output / "evidence.md").write_text(f"# Evidence\n\n{text}", encoding="utf-8")
                drawn = curves.draw(options.output, evidence.runs)
                if options.page is not None:
                    guide.into_page(options.page, text, curves.draw(options.page.parent, evidence.runs))
                print(f"written: {options.output / 'evidence.md'} and {len(drawn)} figures", file=sys.stderr)

        try:
            evidence.run(stages, (lambda: None) if options.report else write)
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from here", file=sys.stderr)
            return 130
    if options.report:
        write()
    print(report.markdown(facts, evidence))
    return 1 if evidence.failures else 0


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
            momenta=stage.momenta and not options.rates_only,
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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evidence",
        description="Does sparse both ways cost accuracy? What is in the journal is not run again.",
    )
    parser.add_argument("--quick", action="store_true", help="ten minutes: one small task, 4 workers, 2 seeds")
    parser.add_argument("--smoke", action="store_true", help="seconds: whether it runs, simulated and real")
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
    parser.add_argument("--report", action="store_true", help="report what the journal has, and run nothing")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/evidence"), metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument("--page", type=guide.page, metavar="FILE", help="Markdown page to put the tables into")
    return parser


if __name__ == "__main__":
    sys.exit(main())
