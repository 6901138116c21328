"""``python -m benchmarks.scale``: measure costs, check the simulation, simulate up to 1,000 workers and 64 shards."""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from benchmarks import report
from benchmarks.harness import machine
from benchmarks.harness.progress import Progress
from benchmarks.report import guide
from benchmarks.report.markdown import markdown
from benchmarks.scale import calibration, check, sections, sweeps
from benchmarks.scale.charts import Chart
from benchmarks.scale.costs import from_plain
from benchmarks.scale.sweeps import Sweeper

_STAGES = 5
_Form = TypeVar("_Form")


def main(arguments: list[str] | None = None) -> int:
    """Run everything and write the report."""
    given = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(given)
    facts = machine.describe(given) | {"command": " ".join(["python -m benchmarks.scale", *given])}
    started = time.monotonic()
    try:
        with Progress(_STAGES) as progress:
            progress.section("costs")
            if options.costs is None:
                extent = _form(options, calibration.SMOKE, calibration.QUICK, calibration.Extent())
                costs, points = calibration.measure(extent, options.seed, progress.say)
            else:
                read = json.loads(options.costs.read_text(encoding="utf-8"))
                costs, points = from_plain(read["costs"]), read["points"]
            options.output.mkdir(parents=True, exist_ok=True)
            kept = json.dumps({"costs": costs.plain(), "points": points}, indent=2)
            (options.output / "costs.json").write_text(kept + "\n", encoding="utf-8")
            found = [sections.costs(costs, points)]
            drawn: list[Chart] = []
            progress.section("check")
            if not options.no_check:
                rows = check.run(
                    _form(options, check.SMOKE, check.QUICK, check.CASES),
                    costs,
                    os.cpu_count() or 1,
                    _form(options, 0.5, 2.0, 3.0),
                    options.rounds or _form(options, 1, 1, 3),
                    options.seed,
                    progress.say,
                )
                section, drawn = sections.check(rows)
                found.append(section)
            grid = _form(options, sweeps.SMOKE, sweeps.QUICK, sweeps.Grid())
            sweeper = Sweeper(costs, options.seed, progress.say)
            progress.section("sweeps")
            section, charts = sections.sweep(sweeper, grid)
            found.append(section)
            drawn = [*drawn, *charts]
            progress.section("bandwidth")
            section, charts = sections.bandwidth(sweeper, grid)
            found.append(section)
            drawn = [*drawn, *charts]
            progress.section("saturation")
            found.append(sections.saturate(sweeper, grid))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    facts["seconds"] = time.monotonic() - started
    console = Console()
    report.show(facts, found, console if console.is_terminal else Console(width=200))
    written = report.write(options.output, facts, found, "report.json")
    written += [chart.save(options.output) for chart in drawn]
    if options.page is not None:
        pictures = [chart.save(options.page.parent) for chart in drawn]
        text = markdown(facts, found).partition("\n\n")[2]  # without the report's head line
        guide.into_page(options.page, text.replace("\n## ", "\n### "), pictures)
        written += [options.page, *pictures]
    console.print(f"\n{facts['seconds']:.0f} s; written: {', '.join(map(str, written))}", markup=False, highlight=False)
    return 0


def _form(options: argparse.Namespace, smoke: _Form, quick: _Form, full: _Form) -> _Form:
    return smoke if options.smoke else quick if options.quick else full


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, repetitions and points")
    parser.add_argument("--smoke", action="store_true", help="seconds: whether it runs")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="take the costs.json of an earlier run")
    parser.add_argument("--no-check", action="store_true", help="leave the real runs out")
    parser.add_argument("--rounds", type=int, default=0, help="of each real run; the medians count")
    parser.add_argument("--seed", type=int, default=0, help="of updates and simulations")
    parser.add_argument("--output", type=Path, default=Path("runs/scale"), metavar="DIR")
    parser.add_argument("--page", type=guide.page, metavar="FILE", help="a page to put tables and pictures into")
    return parser


if __name__ == "__main__":
    sys.exit(main())
