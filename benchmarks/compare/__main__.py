"""``python -m benchmarks.compare``: compare the methods into ``runs/compare``; call it again to go on."""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.compare import figures, report, straggler
from benchmarks.compare.campaign import Campaign
from benchmarks.compare.ledger import Ledger
from benchmarks.compare.methods import METHODS
from benchmarks.compare.plan import FULL, QUICK, SMOKE, Plan
from benchmarks.compare.progress import Progress
from benchmarks.compare.results import entries
from benchmarks.compare.tasks import TASKS
from benchmarks.harness import machine
from benchmarks.report import guide
from benchmarks.report.terminal import rich_table
from verify.cluster.servers import end_on_sigterm

_PARTS = ("quality", "slow-worker")
_NARROWEST = 150


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is not done yet, and report; 0 where nothing failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    end_on_sigterm()  # as Ctrl-C does: what was started is stopped
    torch.set_num_threads(1)  # the tests of the models run beside nothing, but be the same on every machine
    facts = machine.describe(given) | {"command": " ".join(["python -m benchmarks.compare", *given])}
    plan = _plan(options)
    ledger = Ledger(options.output / "runs.jsonl")
    started = time.monotonic()
    effects: list[straggler.Effect] = []
    try:
        with Progress() as progress:
            campaign = Campaign(plan, ledger, progress)
            if "quality" in options.only:
                campaign.run()
            if "slow-worker" in options.only:
                effects = straggler.measure(plan, ledger, progress, campaign.failures)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    facts["seconds"] = time.monotonic() - started
    found, said = report.all_tables(campaign, effects), report.notes(campaign)
    text = report.markdown(facts, found, said)
    written = report.write(options.output, facts, report.figures(campaign, effects), text)
    written += figures.draw(options.output, entries(campaign.runs), effects)
    if options.page is not None:
        drawn = figures.draw(options.page.parent, entries(campaign.runs), effects)
        guide.into_page(options.page, text, drawn)
        written += [options.page, *drawn]
    console = Console()
    if not console.is_terminal:
        console = Console(width=_NARROWEST)
    for table in found:
        console.print(rich_table(table))
    for note in said:
        console.print(f"- {note}", markup=False, highlight=False, style="dim")
    paths = ", ".join(str(path) for path in written)
    console.print(f"\n{facts['seconds']:.0f} s; written: {paths}", markup=False, highlight=False)
    return 1 if campaign.failures else 0


def _plan(options: argparse.Namespace) -> Plan:
    plan = SMOKE if options.smoke else QUICK if options.quick else FULL
    chosen = {
        name: tuple(value)
        for name in ("tasks", "methods", "workers", "seeds")
        if (value := getattr(options, name)) is not None
    }
    if options.density is not None:
        plan = replace(plan, density=options.density)
    return replace(plan, **chosen)  # type: ignore[arg-type]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description="Compare the training methods. What was done is not done again.",
    )
    parser.add_argument("--quick", action="store_true", help="five minutes: 4 workers, 2 seeds, fewer samples")
    parser.add_argument("--smoke", action="store_true", help="seconds: whether it runs, on one task")
    parser.add_argument(
        "--only", nargs="+", choices=_PARTS, default=list(_PARTS), metavar="PART", help=", ".join(_PARTS)
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--workers", nargs="+", type=int, metavar="N", help="numbers of workers")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="seeds of the runs that count")
    parser.add_argument("--density", type=float, metavar="SHARE", help="of the entries that a sparse method sends")
    parser.add_argument("--output", type=Path, default=Path("runs/compare"), metavar="DIR", help="default: %(default)s")
    parser.add_argument(
        "--page", type=guide.page, metavar="FILE", help="Markdown page to put the tables into, figures beside it"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
