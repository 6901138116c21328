"""Tables of seconds to the target, a row a cell."""

from collections.abc import Sequence
from typing import Any

from benchmarks.compare.report import markdown as as_markdown
from benchmarks.harness.section import Table
from benchmarks.rivals.campaign import Campaign, best, mean_bytes
from benchmarks.rivals.cells import PACES, SLOWNESS, TASK, Cell
from benchmarks.rivals.contenders import CONTENDERS, DENSE_STEPS, PERIOD


def markdown(facts: dict[str, Any], campaign: Campaign, cells: Sequence[Cell]) -> str:
    """Return tables, answers, and how they were measured."""
    return as_markdown(facts, _tables(campaign), _notes(campaign, cells))


def _tables(campaign: Campaign) -> list[Table]:
    tables = []
    cells = dict.fromkeys(cell for cell, _ in campaign.measured)
    keys = [key for key in CONTENDERS if any(each == key for _, each in campaign.measured)]
    titles = [CONTENDERS[key].title for key in keys]
    for workers in sorted({cell.workers for cell in cells}):
        rows = [
            (
                cell.words,
                *(_seconds(campaign, cell, key) for key in keys),
                _ahead(campaign, cell),
            )
            for cell in cells
            if cell.workers == workers
        ]
        title = f"{workers} workers: seconds until the test loss is {campaign.target:g} nats; milliseconds a step"
        tables.append(Table(title, ("network, workers", *titles, "best of ours ahead of the best rival"), rows))
    rows = []
    for key in keys:
        up, down = mean_bytes([each for (_, own), each in campaign.measured.items() if own == key])
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
    heads = ("", "kB up a step", "kB down", "test loss at the end", "optimizer and rate")
    return [*tables, Table("Bytes of each worker's card, headers included, and what was reached", heads, rows)]


def _seconds(campaign: Campaign, cell: Cell, key: str) -> str:
    found = campaign.measured.get((cell, key))
    if found is None:
        return "–"
    seconds = "never" if found.seconds is None else f"{found.seconds:.0f}"
    return f"{seconds}; {1000 * found.step_seconds:.0f}"


def _ahead(campaign: Campaign, cell: Cell) -> str:
    """Return by which factor the best method of this library is faster than the best rival; below 1 it is slower."""
    ours, theirs = (
        best([each.seconds for (own, key), each in campaign.measured.items() if own == cell and kind(key)])
        for kind in (_is_ours, lambda key: not _is_ours(key))
    )
    return f"{theirs / ours:.2f} ×" if ours and theirs else "–"


def _is_ours(key: str) -> bool:
    return bool(CONTENDERS[key].method)


def _notes(campaign: Campaign, cells: Sequence[Cell]) -> list[str]:
    done = {cell for cell, _ in campaign.measured}
    left = [f"{cell.words}, {cell.workers} workers" for cell in cells if cell not in done]
    paces = ", ".join(f"{1000 * pace:g} ms with {workers}" for workers, pace in PACES.items())
    return [
        f"Task {TASK}, {campaign.samples:,} samples of all workers together, one seed. A step lasts {paces} workers at "
        f"least; where one worker is slower, {SLOWNESS:g} times as long there.",
        "Rates are searched alike, at full length and without a network, with another seed on other data; so is the "
        "optimizer of the rivals, with DDP's whole gradients.",
        f"A rival's model does not depend on the network: its losses are those of a run without one, and its steps are "
        f"timed, {DENSE_STEPS} first ones, which PowerSGD sends whole, and {2 * PERIOD} more, of which times and bytes "
        "of a step are. This library's methods train to the end in each cell.",
        *(f"Not run: {'; '.join(left)}." for _ in left[:1]),
        *(f"FAILED: {words}" for words in campaign.failures),
    ]
