"""Tables of seconds to the target, a row a cell."""

from collections.abc import Sequence
from itertools import product

from benchmarks.harness.section import Section, Table
from benchmarks.rivals.campaign import Campaign, best, mean_bytes, time_to
from benchmarks.rivals.cells import ABSENT_SECONDS, PACES, SLOWNESS, TASK, Cell
from benchmarks.rivals.contenders import CONTENDERS, DENSE_STEPS, PERIOD


def section(campaign: Campaign, cells: Sequence[Cell], targets: Sequence[float]) -> Section:
    """Return tables, answers, and how they were measured."""
    return Section("rivals", "Time to the same loss", _tables(campaign, targets), notes=_notes(campaign, cells))


def _tables(campaign: Campaign, targets: Sequence[float]) -> list[Table]:
    tables = []
    cells = dict.fromkeys(cell for cell, _ in campaign.measured)
    keys = [key for key in CONTENDERS if any(each == key for _, each in campaign.measured)]
    titles = [CONTENDERS[key].title for key in keys]
    for workers, target in product(sorted({cell.workers for cell in cells}), targets):
        own = [cell for cell in cells if cell.workers == workers]
        rows = [
            (cell.words, *(_seconds(campaign, cell, key, target) for key in keys), _ahead(campaign, cell, target))
            for cell in own
        ]
        title = f"{workers} workers: seconds until the test loss is {target:g} nats"
        tables.append(Table(title, ("network, workers", *titles, "best of ours ahead of the best rival"), rows))
    for workers in sorted({cell.workers for cell in cells}):
        rows = [
            (cell.words, *(_step(campaign, cell, key) for key in keys)) for cell in cells if cell.workers == workers
        ]
        title = f"{workers} workers: milliseconds in which as many steps are made as there are workers"
        tables.append(Table(title, ("network, workers", *titles), rows))
    rows = []
    for key in keys:
        found = {cell: each for (cell, own), each in campaign.measured.items() if own == key}
        usual = [each for cell, each in found.items() if cell.scenario != "lost"]  # without first steps and copies
        up, down = mean_bytes(usual or list(found.values()))
        finals = {workers: loss for (workers, own), loss in campaign.finals.items() if own == key}
        chosen = [campaign.chosen.get((workers, CONTENDERS[key].tuned_as or key)) for workers in finals]
        rows.append(
            (
                CONTENDERS[key].title,
                f"{up / 1e3:.0f}",
                f"{down / 1e3:.0f}",
                ", ".join(f"{loss:.3f} with {workers}" for workers, loss in finals.items()),
                ", ".join(f"{inner} {rate:g}".strip() for inner, rate in (each for each in chosen if each)),
            )
        )
    if not rows:
        return tables
    heads = ("", "kB up a step", "kB down", "test loss at the end, without a network", "optimizer and rate")
    return [*tables, Table("Bytes of each worker's card, headers included, and what was reached", heads, rows)]


def _seconds(campaign: Campaign, cell: Cell, key: str, target: float) -> str:
    found = campaign.measured.get((cell, key))
    if found is None:
        return ""
    seconds = time_to(target, found.curve)
    return "–" if seconds is None else f"{seconds:.0f}"


def _step(campaign: Campaign, cell: Cell, key: str) -> str:
    found = campaign.measured.get((cell, key))
    return "" if found is None else f"{1000 * found.step_seconds:.0f}"


def _ahead(campaign: Campaign, cell: Cell, target: float) -> str:
    """Return by which factor the best method of this library is faster than the best rival; below 1 it is slower."""
    here = {key: time_to(target, found.curve) for (own, key), found in campaign.measured.items() if own == cell}
    if len(here) < len(CONTENDERS):
        return ""
    ours, theirs = (best([here[key] for key in here if _is_ours(key) is wanted]) for wanted in (True, False))
    if ours is None or theirs is None:
        return "no rival gets there" if ours else "only rivals get there" if theirs else "–"
    return f"{theirs / ours:.2f} ×"


def _is_ours(key: str) -> bool:
    return bool(CONTENDERS[key].method)


def _notes(campaign: Campaign, cells: Sequence[Cell]) -> list[str]:
    done = {cell for cell, _ in campaign.measured}
    left = [f"{cell.words}, {cell.workers} workers" for cell in cells if cell not in done]
    paces = ", ".join(f"{1000 * pace:g} ms with {workers}" for workers, pace in PACES.items())
    free = ", ".join(f"{1000 * each:.0f} ms with {workers}" for workers, each in campaign.unhindered.items())
    return [
        f"Task {TASK}, {campaign.samples:,} samples of all workers together, one seed. A step lasts {paces} workers at "
        f"least; where one worker is slower, {SLOWNESS:g} times as long there."
        + (f" Measured on loopback, DDP: {free}." if free else ""),
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
