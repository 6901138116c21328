"""``python -m benchmarks.rivals``: time to the same loss against torch's own ways, on networks made here; resumable.

Needs root, for network namespaces. What is in the journal is not run again.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

from benchmarks.campaign import command
from benchmarks.campaign.journal import Journal
from benchmarks.evidence.stages import SAMPLES
from benchmarks.harness.section import Section
from benchmarks.network import lab
from benchmarks.rivals import report
from benchmarks.rivals.campaign import Campaign
from benchmarks.rivals.cells import LINES, PACES, SCENARIOS, SEEDS, TASK, Cell, cells, decides, train
from benchmarks.rivals.contenders import CONTENDERS

_UNAVAILABLE = 77
_QUICK_SAMPLES = 1024
_TARGETS, _QUICK_TARGETS = (2.3, 2.2, 2.1), (3.2,)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the journal lacks, and report after each cell; 0 where nothing failed, 77 without namespaces."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    reason = None if options.report else lab.unavailable()
    if reason:
        print(f"benchmarks.rivals: {reason}", file=sys.stderr)
        return _UNAVAILABLE
    planned = [
        cell
        for cell in cells(options.quick or options.smoke)
        if cell.workers in (options.workers or (cell.workers,))
        and f"{cell.mbits}/{cell.delay_ms}" in (options.lines or (f"{cell.mbits}/{cell.delay_ms}",))
        and cell.scenario in (options.scenarios or SCENARIOS)
    ]
    samples = _QUICK_SAMPLES if options.quick or options.smoke else SAMPLES[TASK]
    targets = options.targets or (_QUICK_TARGETS if options.quick or options.smoke else _TARGETS)

    def seeds(cell: Cell) -> Sequence[int]:
        return options.seeds or SEEDS[: len(SEEDS) if decides(cell) else 1]

    def make(journal: Journal) -> tuple[command.Work, Callable[[], list[Section]]]:
        campaign = Campaign(journal, samples, seeds, train, options.smoke, options.contenders or tuple(CONTENDERS))
        return lambda tell: campaign.run(planned, tell), lambda: [report.section(campaign, planned, targets)]

    return command.run(options, given, make)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "rivals",
        "Time to the same loss against torch's own ways, on networks made here. Needs root.",
        "one cell with short runs, in minutes",
        "seconds: whether it runs, with two contenders",
    )
    parser.add_argument(
        "--workers", nargs="+", type=int, choices=PACES, metavar="N", help="numbers of workers: 4, 8, 16"
    )
    lines = [f"{mbits}/{delay_ms}" for mbits, delay_ms in LINES]
    parser.add_argument("--lines", nargs="+", choices=lines, metavar="MBITS/MS", help=f"networks: {', '.join(lines)}")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, metavar="NAME", help=", ".join(SCENARIOS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, metavar="NAME", help=", ".join(CONTENDERS))
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="in place of those of each cell")
    parser.add_argument("--targets", nargs="+", type=float, metavar="NATS", help="test losses to reach")
    return parser


if __name__ == "__main__":
    sys.exit(main())
