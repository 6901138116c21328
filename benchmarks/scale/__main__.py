"""``python -m benchmarks.scale``: measure costs, check the simulation, simulate up to 1,000 workers and 64 shards."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import machine
from benchmarks.harness import report as reports
from benchmarks.harness.progress import Progress
from benchmarks.scale import calibration, check, report, sweeps
from benchmarks.scale.calibration import Extent
from benchmarks.scale.check import Case
from benchmarks.scale.costs import from_plain
from benchmarks.scale.sweeps import Grid, Sweeper

_STAGES = 5
_SEED = 0


class _Form(NamedTuple):
    """How much is measured: costs, real runs with their seconds and rounds, simulations."""

    extent: Extent
    cases: Sequence[Case]
    seconds: float
    rounds: int
    grid: Grid


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything and write the report."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    facts, started = machine.describe("benchmarks.scale", given), time.monotonic()
    form = _Form(Extent(), check.CASES, 3.0, 3, Grid())
    if options.quick:
        form = _Form(calibration.QUICK, check.QUICK, 2.0, 1, sweeps.QUICK)
    if options.smoke:
        form = _Form(calibration.SMOKE, check.SMOKE, 0.5, 1, sweeps.SMOKE)
    try:
        with Progress(_STAGES) as progress:
            progress.section("costs")
            if options.costs is None:
                costs, points = calibration.measure(form.extent, _SEED, progress.say)
            else:
                read = json.loads(options.costs.read_text(encoding="utf-8"))
                costs, points = from_plain(read["costs"]), read["points"]
            options.output.mkdir(parents=True, exist_ok=True)
            kept = json.dumps({"costs": costs.plain(), "points": points}, indent=2)
            (options.output / "costs.json").write_text(kept + "\n", encoding="utf-8")
            found = [report.costs(costs, points)]
            progress.section("check")
            if not options.no_check:
                cores = os.cpu_count() or 1
                rows = check.run(form.cases, costs, cores, form.seconds, form.rounds, _SEED, progress.say)
                found.append(report.check(rows))
            sweeper = Sweeper(costs, _SEED, progress.say)
            for name, simulate in (
                ("sweeps", report.sweep),
                ("bandwidth", report.bandwidth),
                ("saturation", report.saturate),
            ):
                progress.section(name)
                found.append(simulate(sweeper, form.grid))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    reports.show(reports.write(options.output, "Scale", facts, found), time.monotonic() - started)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, repetitions and points")
    parser.add_argument("--smoke", action="store_true", help="seconds: whether it runs")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="take the costs.json of an earlier run")
    parser.add_argument("--no-check", action="store_true", help="leave the real runs out")
    parser.add_argument("--output", type=Path, default=Path("runs/scale"), metavar="DIR")
    return parser


if __name__ == "__main__":
    sys.exit(main())
