"""``python -m benchmarks.compare``: compare the methods into ``runs/compare``; call it again to go on."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.campaign import command
from benchmarks.campaign.comparison import Comparison
from benchmarks.campaign.execute import execute
from benchmarks.campaign.ledger import Ledger
from benchmarks.campaign.methods import METHODS
from benchmarks.campaign.progress import Progress
from benchmarks.campaign.report import markdown
from benchmarks.campaign.tasks import TASKS
from benchmarks.compare import figures, report, straggler
from benchmarks.compare.plan import FULL, QUICK, SMOKE
from benchmarks.compare.results import entries

_PARTS = ("quality", "slow-worker")


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is not done yet, and report; 0 if nothing failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = command.parser(
        "compare",
        "Compare the training methods.",
        "five minutes: 4 workers, 2 seeds, fewer samples",
        "seconds: one task",
    )
    parser.add_argument(
        "--only", nargs="+", choices=_PARTS, default=list(_PARTS), metavar="PART", help=", ".join(_PARTS)
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--workers", nargs="+", type=int, metavar="N", help="numbers of workers")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="seeds of the runs that count")
    parser.add_argument("--density", type=float, metavar="SHARE", help="of the entries that a sparse method sends")
    options = parser.parse_args(given)
    plan = SMOKE if options.smoke else QUICK if options.quick else FULL
    chosen = {
        name: tuple(value)
        for name in ("tasks", "methods", "workers", "seeds")
        if (value := getattr(options, name)) is not None
    }
    plan = replace(plan, **chosen, density=options.density or plan.density)  # type: ignore[arg-type]
    effects: list[straggler.Effect] = []

    def make(ledger: Ledger, progress: Progress) -> tuple[Comparison, command.Report, Callable[[command.Tell], None]]:
        campaign = Comparison(ledger, progress, None if options.report else execute)

        def work(tell: command.Tell) -> None:
            if "quality" in options.only:
                campaign.run(plan.stages(), tell)
            if "slow-worker" in options.only:
                effects[:] = straggler.measure(plan, campaign, do=not options.report)

        told = command.Report(
            lambda facts: markdown(facts, report.all_tables(campaign, effects), report.notes(plan, campaign)),
            lambda: report.figures(plan, campaign, effects),
            lambda folder: figures.draw(folder, entries(campaign.counted), effects),
        )
        return campaign, told, work

    return command.run(options, given, make)


if __name__ == "__main__":
    sys.exit(main())
