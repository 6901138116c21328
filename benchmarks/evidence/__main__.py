"""``python -m benchmarks.evidence``: run what the journal has not yet, and report; call it again to go on."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.campaign import command, fetch, report
from benchmarks.campaign.comparison import ASGD, Comparison
from benchmarks.campaign.execute import execute
from benchmarks.campaign.journal import Journal
from benchmarks.campaign.tasks import TASKS
from benchmarks.evidence.stages import FORMS, HALVES, LOCAL, QUICK, SAMPLES, SIZE, SMOKE, full
from benchmarks.harness.section import Section

RIVALS: report.Rivals = {"the dense twin": lambda entrant: entrant.twin, "dense ASGD": lambda _: ASGD}


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is not done yet, and report after each stage; 0 if nothing failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = command.parser(
        "evidence",
        "Does sparse both ways cost accuracy?",
        "ten minutes: one small task, 4 workers, 2 seeds",
        "seconds: whether it runs, simulated and real",
    )
    parser.add_argument("--only", choices=("simulated", "real"), help="one kind of runs")
    command.add_choices(parser, SAMPLES, FORMS)
    parser.add_argument("--text", type=Path, metavar="FILE", help="a plain text in the place of the fetched English")
    options = parser.parse_args(given)
    if options.text is not None and not options.text.is_file():
        parser.error(f"--text: there is no file {options.text}")
    stages = [
        stage
        for stage in command.chosen(
            SMOKE if options.smoke else QUICK if options.quick else (*full(), *SIZE, *LOCAL, *HALVES), options
        )
        if options.only is None or stage.simulated == (options.only == "simulated")
    ]
    if options.text is not None:
        fetch.text(options.text)
    if not options.report:
        for task in {stage.task for stage in stages}:
            TASKS[task].source()  # fetched here, once, and not in each process

    def make(journal: Journal) -> tuple[command.Work, Callable[[], list[Section]]]:
        evidence = Comparison(journal, execute)

        def sections() -> list[Section]:
            return [report.section("evidence", "Sparse both ways against dense", evidence, RIVALS)]

        return lambda tell: evidence.run(stages, tell), sections

    return command.run(options, given, make)


if __name__ == "__main__":
    sys.exit(main())
