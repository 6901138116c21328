"""``python -m benchmarks.rivals``: time to the same loss against torch's own ways, on networks made here; resumable.

Needs root, for network namespaces. What is in the journal is not run again.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare.ledger import Ledger
from benchmarks.compare.progress import Progress
from benchmarks.evidence.stages import SAMPLES
from benchmarks.harness import machine
from benchmarks.network import lab
from benchmarks.report import guide
from benchmarks.rivals import report
from benchmarks.rivals.campaign import Campaign
from benchmarks.rivals.cells import LINES, PACES, SCENARIOS, TASK, cells, train
from verify.cluster.servers import end_on_sigterm

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
    end_on_sigterm()
    facts = machine.describe(given) | {"command": f"python -m benchmarks.rivals {shlex.join(given)}".strip()}
    planned = [
        cell
        for cell in cells(options.quick or options.smoke)
        if cell.workers in (options.workers or (cell.workers,))
        and f"{cell.mbits}/{cell.delay_ms}" in (options.lines or (f"{cell.mbits}/{cell.delay_ms}",))
        and cell.scenario in (options.scenarios or SCENARIOS)
    ]
    samples = _QUICK_SAMPLES if options.quick or options.smoke else SAMPLES[TASK]
    targets = options.targets or (_QUICK_TARGETS if options.quick or options.smoke else _TARGETS)
    with Progress() as progress:
        ledger = Ledger(options.output / "journal.jsonl")
        campaign = Campaign(ledger, progress, samples, None if options.report else train, options.smoke)

        def write() -> None:
            text = report.markdown(facts, campaign, planned, targets)
            options.output.mkdir(parents=True, exist_ok=True)
            (options.output / "rivals.md").write_text(f"# Rivals\n\n{text}", encoding="utf-8")
            if options.page is not None:
                guide.into_page(options.page, text, [])

        try:
            campaign.run(planned, (lambda: None) if options.report else write)
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from here", file=sys.stderr)
            return 130
    write()
    print(report.markdown(facts, campaign, planned, targets))
    return 1 if campaign.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one cell with short runs, in minutes")
    parser.add_argument("--smoke", action="store_true", help="seconds: whether it runs, with two contenders")
    parser.add_argument("--workers", nargs="+", type=int, choices=PACES, metavar="N", help="numbers of workers: 4, 8")
    lines = [f"{mbits}/{delay_ms}" for mbits, delay_ms in LINES]
    parser.add_argument("--lines", nargs="+", choices=lines, metavar="MBITS/MS", help=f"networks: {', '.join(lines)}")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, metavar="NAME", help=", ".join(SCENARIOS))
    parser.add_argument("--targets", nargs="+", type=float, metavar="NATS", help="test losses to reach")
    parser.add_argument("--report", action="store_true", help="report what the journal has, and run nothing")
    parser.add_argument("--output", type=Path, default=Path("runs/rivals"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--page", type=guide.page, metavar="FILE", help="Markdown page to put the tables into")
    return parser


if __name__ == "__main__":
    sys.exit(main())
