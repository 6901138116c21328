"""The command of a campaign: do what the ledger has not yet, and report after each stage; called again it goes on."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.campaign.ledger import Ledger
from benchmarks.campaign.progress import Progress
from benchmarks.campaign.runner import Runner
from benchmarks.harness import machine
from benchmarks.report import guide
from verify.cluster.servers import end_on_sigterm


def parser(name: str, what: str, quick: str, smoke: str) -> argparse.ArgumentParser:
    """Return a parser with what every campaign is asked."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=f"{what} What is in the ledger is not run again."
    )
    made.set_defaults(campaign=name)
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--smoke", action="store_true", help=smoke)
    made.add_argument("--report", action="store_true", help="report what the ledger has, and run nothing")
    made.add_argument("--output", type=Path, default=Path("runs") / name, metavar="DIR", help="default: %(default)s")
    made.add_argument("--page", type=guide.page, metavar="FILE", help="Markdown page to put the tables into")
    return made


Tell = Callable[[], None]
"""Called when there is something new to report."""


class Report:
    """What a campaign tells so far.

    Args:
        markdown: takes the machine's facts.
        figures: what was measured, for JSON; empty for none.
        draw: writes pictures into a folder; returns their paths.
    """

    def __init__(
        self,
        markdown: Callable[[dict[str, Any]], str],
        figures: Callable[[], Mapping[str, Any]] = dict,
        draw: Callable[[Path], list[Path]] = lambda folder: [],
    ) -> None:
        self.markdown, self.figures, self.draw = markdown, figures, draw


def run(
    options: argparse.Namespace,
    given: Sequence[str],
    make: Callable[[Ledger, Progress], tuple[Runner, Report, Callable[[Tell], None]]],
) -> int:
    """Run a campaign and write its report; return 0 if nothing failed, 130 if it was interrupted.

    Args:
        options: those of :func:`parser`.
        given: the command line.
        make: returns what does the work, what it tells, and the work: a function that is given what to call when there
            is something new to report.
    """
    end_on_sigterm()  # as Ctrl-C does: what was started is stopped
    torch.set_num_threads(1)  # models are tested alike on every machine
    command = f"python -m benchmarks.{options.campaign} {shlex.join(given)}".strip()
    facts = machine.describe(list(given)) | {"command": command}
    written: list[Path] = []
    with Progress() as progress:
        runner, report, work = make(Ledger(options.output / "journal.jsonl"), progress)

        def write() -> None:
            text = report.markdown(facts)
            options.output.mkdir(parents=True, exist_ok=True)
            page = options.output / f"{options.campaign}.md"
            page.write_text(f"# {options.campaign.capitalize()}\n\n{text}", encoding="utf-8")
            written[:] = [page, *report.draw(options.output)]
            if figures := report.figures():
                data = options.output / f"{options.campaign}.json"
                data.write_text(json.dumps({**facts, **figures}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
                written.append(data)
            if options.page is not None:
                guide.into_page(options.page, text, report.draw(options.page.parent))

        try:
            work((lambda: None) if options.report else write)
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from here", file=sys.stderr)
            return 130
    write()
    print(report.markdown(facts))
    print(f"written: {', '.join(map(str, written))}", file=sys.stderr)
    return 1 if runner.failures else 0
