"""Tables of seconds to the target, a row a cell."""

from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean, stdev

from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.harness.plots import Plot, frame, legend, style_of
from benchmarks.harness.section import Section, Table
from benchmarks.rivals.campaign import Campaign, Measured, is_twin, mean_bytes, time_to
from benchmarks.rivals.cells import ABSENT_SECONDS, PACES, SCENARIOS, SEEDS, SLOWNESS, TASK, Cell
from benchmarks.rivals.contenders import CONTENDERS, DENSE_STEPS, PERIOD

_Curves = Mapping[str, Sequence[Sequence[tuple[float, float]]]]
"""Of each seed, by key of the contender."""


def section(campaign: Campaign, cells: Sequence[Cell], targets: Sequence[float]) -> Section:
    """Return tables, pictures, and how they were measured."""
    counts = dict.fromkeys(cell.workers for cell, _ in campaign.measured)
    plots = [plot for each in product(counts, targets) if (plot := _over_rates(campaign, *each))]
    return Section("rivals", "Time to the same loss", _tables(campaign, targets), plots, _notes(campaign, cells))


def _over_rates(campaign: Campaign, workers: int, target: float) -> Plot | None:
    """Draw the time to a target over the networks' rates, a place a delay and scenario; ``None`` if nobody gets there.

    Of seeds the mean, if all get there.
    """
    cells = list(dict.fromkeys(cell for cell, _ in campaign.measured if cell.workers == workers))
    places = sorted({(cell.delay_ms, cell.scenario) for cell in cells})
    figure, planes = frame(len(places), 3.6, share=True)
    rates, is_empty = sorted({cell.mbits for cell in cells}), True
    for (delay_ms, scenario), plane in zip(places, planes, strict=True):
        here = sorted(cell for cell in cells if (cell.delay_ms, cell.scenario) == (delay_ms, scenario))
        for number, (key, contender) in enumerate(CONTENDERS.items()):
            found = [(cell.mbits, _fastest(target, {key: _curves(campaign, cell, key)})) for cell in here]
            points = [(mbits, fastest[0]) for mbits, fastest in found if fastest is not None]
            colour, marker = style_of(number)
            plane.plot(
                [mbits for mbits, _ in points],
                [seconds for _, seconds in points],
                label=contender.title,
                color=colour,
                marker=marker,
                markersize=6,
                linestyle="-" if contender.method else "--",
            )
            is_empty &= not points
        plane.set_xscale("log")
        plane.set_yscale("log")
        plane.set_xticks(rates, labels=[f"{mbits:g}" for mbits in rates])
        for axis in (plane.xaxis, plane.yaxis):
            axis.set_minor_formatter(NullFormatter())
        plane.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        plane.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
        plane.set_xlim(min(rates) / 2, max(rates) * 2)
        plane.set_xlabel("Mbit/s of each card")
        plane.set_title(f"{delay_ms:g} ms, {SCENARIOS[scenario]}", fontsize=10)
    planes[0].set_ylabel(f"seconds to {target:g} nats")
    caption = "Solid: ours. Dashed: rivals. Missing: not reached with every seed."
    title = f"{workers} workers: seconds until the test loss is {target:g} nats"
    return None if is_empty else Plot(f"rivals-{workers}-{target:g}", title, caption, legend(figure, planes[0], 4))


def _tables(campaign: Campaign, targets: Sequence[float]) -> list[Table]:
    tables = []
    cells = dict.fromkeys(cell for cell, _ in campaign.measured)
    keys = [key for key in CONTENDERS if any(each == key for _, each in campaign.measured)]
    titles = [CONTENDERS[key].title for key in keys]
    for workers, target in product(dict.fromkeys(cell.workers for cell in cells), targets):
        rows = [
            (cell.words, *(_seconds(campaign, cell, key, target) for key in keys), *_leads(campaign, cell, target))
            for cell in cells
            if cell.workers == workers
        ]
        title = f"{workers} workers: seconds until the test loss is {target:g} nats"
        tables.append(Table(title, ("network, workers", *titles, "lead", "lead without gloo's CPU"), rows))
    for workers in dict.fromkeys(cell.workers for cell in cells):
        rows = [
            (cell.words, *(_step(campaign, cell, key) for key in keys)) for cell in cells if cell.workers == workers
        ]
        title = f"{workers} workers: milliseconds in which as many steps are made as there are workers"
        tables.append(Table(title, ("network, workers", *titles), rows))
    rows = []
    for key in keys:
        found = [
            (cell, each) for (cell, own), seeds in campaign.measured.items() if own == key for each in seeds.values()
        ]
        usual = [each for cell, each in found if cell.scenario != "lost"]  # without first steps and copies
        up, down = mean_bytes(usual or [each for _, each in found])
        finals = {workers: seeds for (workers, own), seeds in campaign.finals.items() if own == key}
        chosen = [campaign.chosen.get((workers, CONTENDERS[key].tuned_as or key)) for workers in finals]
        rows.append(
            (
                CONTENDERS[key].title,
                f"{up / 1e3:.0f}",
                f"{down / 1e3:.0f}",
                ", ".join(f"{_spread_words([*seeds.values()])} with {workers}" for workers, seeds in finals.items()),
                ", ".join(f"{inner} {rate:g}".strip() for inner, rate in (each for each in chosen if each)),
            )
        )
    if not rows:
        return tables
    heads = ("", "kB up a step", "kB down", "test loss at the end, without a network", "optimizer and rate")
    return [*tables, Table("Bytes of each worker's card, headers included, and what was reached", heads, rows)]


def _curves(campaign: Campaign, cell: Cell, key: str) -> list[list[tuple[float, float]]]:
    return [each.curve for each in campaign.measured.get((cell, key), {}).values()]


def _seconds(campaign: Campaign, cell: Cell, key: str, target: float) -> str:
    curves = _curves(campaign, cell, key)
    if not curves:
        return ""
    times = [seconds for curve in curves if (seconds := time_to(target, curve)) is not None]
    if len(times) < len(curves):
        return f"– ({len(times)} of {len(curves)})" if times else "–"
    ends = sorted({f"{seconds:.0f}" for seconds in (min(times), max(times))}, key=int)
    return f"{fmean(times):.0f}" + (f" ({' to '.join(ends)})" if len(ends) > 1 else "")


def _step(campaign: Campaign, cell: Cell, key: str) -> str:
    found = campaign.measured.get((cell, key))
    return f"{1000 * fmean(each.step_seconds for each in found.values()):.0f}" if found else ""


def _spread_words(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def _leads(campaign: Campaign, cell: Cell, target: float) -> tuple[str, str]:
    """Return by which factor the best of ours is faster than the best rival; then, if no core were shared by gloo."""
    here = {key: seeds for (own, key), seeds in campaign.measured.items() if own == cell}
    if any(key not in here for key in CONTENDERS if not is_twin(CONTENDERS[key], cell.workers)):
        return "", ""
    ours = {key: _curves(campaign, cell, key) for key in here if CONTENDERS[key].method}
    theirs = {key: _curves(campaign, cell, key) for key in here if not CONTENDERS[key].method}
    free = {key: [_without_gloo(each) for each in here[key].values()] for key in theirs}
    return _lead(target, ours, theirs), _lead(target, ours, free)


def _lead(target: float, ours: _Curves, theirs: _Curves) -> str:
    fastest, rival = _fastest(target, ours), _fastest(target, theirs)
    if fastest is None or rival is None:
        return "no rival gets there" if fastest else "only rivals get there" if rival else "–"
    (mean, times), (rivals_mean, rivals_times) = fastest, rival
    apart = len(times) == 1 or max(times) < min(rivals_times) or min(times) > max(rivals_times)
    return f"{rivals_mean / mean:.2f} ×" + ("" if apart else ", within the seeds' spread")


def _fastest(target: float, curves: _Curves) -> tuple[float, list[float]] | None:
    """Return the least mean time and the times that it is of; ``None`` if nobody gets there with every seed."""
    found = [[time_to(target, curve) for curve in seeds] for seeds in curves.values()]
    whole = [[seconds for seconds in times if seconds is not None] for times in found if None not in times]
    return min(((fmean(times), times) for times in whole if times), default=None)


def _without_gloo(measured: Measured) -> list[tuple[float, float]]:
    factor = 1 - measured.gloo_seconds / measured.step_seconds
    return [(factor * seconds, loss) for seconds, loss in measured.curve]


def _notes(campaign: Campaign, cells: Sequence[Cell]) -> list[str]:
    done = {cell for cell, _ in campaign.measured}
    left = [f"{cell.words}, {cell.workers} workers" for cell in cells if cell not in done]
    paces = ", ".join(f"{1000 * pace:g} ms with {workers}" for workers, pace in PACES.items())
    return [
        f"Task {TASK}, {campaign.samples:,} samples of all workers together. A step lasts {paces} workers at least; "
        f"where one worker is slower, {SLOWNESS:g} times as long there.",
        f"Several seeds ({', '.join(map(str, SEEDS))}): the mean, the least and the largest in brackets; losses "
        "with one deviation. A contender that does not get there with every seed is no leader.",
        "Lead: the best rival's time over the best of ours. Without gloo's CPU: as if each rival's step took nothing "
        "beyond its pace where there is no network; all processes of gloo share this machine's cores.",
        *("Nothing is measured yet: run the command without --report." for _ in range(not done)),
        "–: not reached. Empty: not run.",
        "Rates are searched alike, at full length and without a network, with another seed on other data; so is the "
        "optimizer of the rivals, with DDP's whole gradients.",
        f"A rival's model does not depend on the network: its losses are those of a run without one, and its steps are "
        f"timed, {DENSE_STEPS} first ones, which PowerSGD sends whole, and {2 * PERIOD} more, of which times and bytes "
        "of a step are. This library's methods train to the end in each cell, and rivals where a worker is lost.",
        f"One lost: the last worker's process is killed after half of its steps; {ABSENT_SECONDS:g} s later another "
        "takes its place. A rival's survivors notice at once, go on in the same processes without a checkpoint, and "
        "take the new one in at the next step whose number 8 divides: torchrun would start all processes again.",
        *(f"Not run: {'; '.join(left)}." for _ in left[:1]),
    ]
