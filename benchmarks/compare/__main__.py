"""``python -m benchmarks.compare``: compare the methods into ``runs/compare``; call it again to go on."""

import sys
from collections.abc import Callable, Sequence

from benchmarks.campaign import command, report
from benchmarks.campaign.comparison import Comparison, Entrant
from benchmarks.campaign.execute import execute
from benchmarks.campaign.journal import Journal
from benchmarks.campaign.methods import SUBJECT
from benchmarks.campaign.tasks import TASKS
from benchmarks.compare import straggler
from benchmarks.compare.stages import FORM, FULL, QUICK, SMOKE
from benchmarks.harness.section import Section

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
    parser.add_argument("--only", choices=_PARTS, help="one part")
    parser.add_argument("--density", type=float, default=0.01, metavar="SHARE", help="of a sparse method's pushes")
    command.add_choices(parser, TASKS, (FORM,))
    options = parser.parse_args(given)
    plan = SMOKE if options.smoke else QUICK if options.quick else FULL
    stages = command.chosen(plan.stages(options.density), options)
    timed = [key for key in plan.methods if key in (options.methods or plan.methods)]
    subject = Entrant(SUBJECT, FORM)

    def make(journal: Journal) -> tuple[command.Work, Callable[[], list[Section]]]:
        campaign, effects = Comparison(journal, execute), list[straggler.Effect]()

        def work(tell: Callable[[], object]) -> None:
            if options.only != "slow-worker":
                campaign.run(stages, tell)
            if options.only != "quality":
                effects[:] = straggler.measure(timed, plan.timed_seconds, options.density, journal)

        def sections() -> list[Section]:
            rivals: report.Rivals = {"DGS": lambda _: subject}
            quality = report.section("compare", "Quality after the same samples", campaign, rivals)
            return [quality, straggler.section(effects)]

        return work, sections

    return command.run(options, given, make)


if __name__ == "__main__":
    sys.exit(main())
