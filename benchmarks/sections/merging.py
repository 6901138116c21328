"""Section *merging*: what is left of a push after the last gradient, by which tensors travel together.

On its own, with the models at full size: ``python -m benchmarks.sections.merging --startup-ms 1 5 --rounds 11``.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.console import Console

from benchmarks import report
from benchmarks.harness import machine, plots
from benchmarks.harness.section import Plan, Section, Table
from benchmarks.harness.timing import Stat
from benchmarks.mgs.models import MODELS, PaperModel
from benchmarks.mgs.published import PublishedCosts, sent_bytes
from benchmarks.mgs.runs import RULES, Link, Run, compare
from psclient.buckets import bucketing
from psclient.buckets.costs import Workload, predict

KEY, TITLE = "merging", "Which tensors travel together (MGS-SGD)"

_GIGABIT = 125e6  # bytes a second
_QUICK, _FULL = ("resnet50",), ("resnet50", "inception_v4")
_STARTUP = 5e-3
_SECONDS_A_WORK = 0.03e-9
_LEAST_SECONDS = 0.1
_PUBLISHED_WORKERS, _PUBLISHED_DENSITY = 4, 0.001
_NAMES = {"layers": "every tensor", "buckets": "25 MB buckets", "greedy": "the paper's greedy", "pareto": "exact"}


def run(plan: Plan) -> Section:
    """Measure the models that the section's time allows for."""
    runs: list[Run] = []
    for name in _QUICK if plan.quick else _FULL:
        if not runs or plan.has_time(90):
            runs.append(_measure(MODELS[name](), _STARTUP, 3 if plan.quick else 7, plan))
    return section(runs)


def section(runs: Sequence[Run]) -> Section:
    """Make a section of what was measured."""
    made = Section(KEY, TITLE)
    heads = (
        "plan", "groups", "exposed, ms", "to every tensor", "to 25 MB buckets", "predicted, ms", "predicted / measured"
    )  # fmt: skip
    for each in runs:
        title = (
            f"{each.model.name}: {len(each.model.layout.parameters)} tensors, {each.model.layout.size / 1e6:.1f} "
            f"million elements; backward {each.backward * 1e3:.0f} ms, {each.link.startup * 1e3:g} ms a message"
        )
        made.tables.append(Table(title, heads, [_row(each, rule) for rule in RULES]))
        made.figures[f"{each.model.name}, {each.link.startup * 1e3:g} ms"] = _figures(each)
        bars = [(_NAMES[rule], median(each.outcomes[rule].exposed) * 1e3) for rule in RULES]
        caption = "Median from the last gradient to the answer; less is better."
        made.plots.append(plots.bars(title, caption, "ms", bars))
    made.tables.append(_published())
    made.notes += [
        "Exposed: from the last gradient to the acknowledgement of the push, on the worker. A real worker (DGS with "
        "overlap), a real server, and between them a proxy in which each message up occupies the link for the time "
        "that is named and each byte for that of 1 Gbit/s. One step with each plan in turn, again and again; medians, "
        "and ratios formed round by round. Greedy and exact plans are made anew before each of their steps, from the "
        "costs until then. Backward is slept: each gradient comes when its share of the multiplications is "
        f"done, at {_SECONDS_A_WORK * 1e12:.0f} ms for a thousand million of them, and no sooner than in "
        f"{_LEAST_SECONDS * 1e3:.0f} ms. Selection is real, on the host.",
        "Predicted: from the costs that were measured up to the step before, by the model that the plan is made with.",
        "A step begins when a fixed piece of work takes next to its shortest time, or after a second: "
        + ", ".join(f"{each.noisy:.0%}" for each in runs)
        + " of the steps began on a machine that was busy with something else.",
        f"Rounds: {', '.join(str(len(each.outcomes['pareto'].exposed)) for each in runs)}. "
        + "Costs: "
        + "; ".join(
            f"{each.model.name}: {each.costs.message * 1e3:.2f} ms a message, {each.costs.group * 1e3:.2f} ms a group, "
            f"{each.costs.tensor * 1e6:.0f} µs a tensor, {each.costs.element * 1e9:.1f} ns an element, exact plan made "
            f"in {each.planning * 1e3:.0f} ms"
            for each in runs
        ),
    ]
    return made


def _measure(model: PaperModel, startup: float, rounds: int, plan: Plan) -> Run:
    backward = max(_LEAST_SECONDS, sum(model.work) * _SECONDS_A_WORK)
    return compare(
        model, Link(startup, _GIGABIT), backward, plan.density, rounds, plan.seed, plan.say, lambda: plan.has_time(10)
    )


def _row(each: Run, rule: str) -> tuple[str, ...]:
    outcome = each.outcomes[rule]
    return (
        _NAMES[rule],
        str(outcome.groups),
        Stat.of(outcome.exposed).milliseconds(),
        *("" if rule == other else _ratio(each, rule, other).ratio() for other in ("layers", "buckets")),
        f"{median(outcome.predicted) * 1e3:.1f}",
        f"{1 + outcome.error:.0%}",
    )


def _ratio(each: Run, rule: str, other: str) -> Stat:
    pairs = zip(each.outcomes[rule].exposed, each.outcomes[other].exposed, strict=True)
    return Stat.of([ours / theirs for ours, theirs in pairs])


def _figures(each: Run) -> dict[str, object]:
    return {
        rule: {
            "groups": outcome.groups,
            "exposed_seconds": Stat.of(outcome.exposed).plain(),
            "predicted_seconds": median(outcome.predicted),
            "to_layers": _ratio(each, rule, "layers").plain(),
            "to_buckets": _ratio(each, rule, "buckets").plain(),
        }
        for rule, outcome in each.outcomes.items()
    }


def _published() -> Table:
    """Compare greedy and exact plans under the paper's own costs; nothing is measured for that."""
    costs = PublishedCosts(workers=_PUBLISHED_WORKERS)
    rows = []
    for make in MODELS.values():
        model = make()
        backward = max(_LEAST_SECONDS, sum(model.work) * _SECONDS_A_WORK)
        work = np.array(model.work)[::-1]
        elements = np.array([spec.numel for spec in model.layout.parameters], dtype=np.float64)[::-1]
        ready = backward * np.cumsum(work) / work.sum()
        load = Workload(ready, np.ones_like(ready), elements, sent_bytes(elements, _PUBLISHED_DENSITY))
        greedy, exact = (plan(load, costs) for plan in (bucketing.greedy, bucketing.exact))
        seconds = [predict(cuts, load, costs).exposed + backward for cuts in (greedy, exact)]
        gained = 1 - seconds[1] / seconds[0]
        rows.append(
            (
                model.name,
                str(len(greedy) - 1),
                str(len(exact) - 1),
                *(f"{s * 1e3:.0f}" for s in seconds),
                f"{gained:.1%}",
            )
        )
    title = (
        f"In theory, by the paper's costs ({_PUBLISHED_WORKERS} workers, 1 Gbit/s, density {_PUBLISHED_DENSITY:.1%}, "
        "selection on the stream of backward): backward, selection and sending, ms"
    )
    return Table(title, ("model", "groups, greedy", "groups, exact", "greedy", "exact", "greedy leaves"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models named, at full size, and write the report."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sections.merging", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--startup-ms", type=float, nargs="+", default=[1.0, 5.0], help="milliseconds a message")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/merging"))
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    facts = machine.describe(given)
    facts["command"] = "python -m benchmarks.sections.merging " + " ".join(given)
    console = Console(width=160)
    runs: list[Run] = []
    started = time.monotonic()
    for name in options.models:
        for startup in options.startup_ms:
            model = MODELS[name]()
            plan = Plan(False, model.layout, model.name, options.density, 0, 0, options.seed, lambda _: None)
            runs.append(_measure(model, startup / 1e3, options.rounds, plan))
            report.show(facts, [section(runs[-1:])], console)
    made = section(runs)
    made.seconds = time.monotonic() - started
    report.write(options.output, facts, [made])
    return 0


if __name__ == "__main__":
    sys.exit(main())
