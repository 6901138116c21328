"""Section: a step of an embedding, against the rows of its table: the same rows are touched, however many there are."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import psutil
import torch
from torch import nn

import psclient
from benchmarks.harness.section import Plan, Section, Table
from benchmarks.harness.timing import Stat
from psclient.rpc.local_server import LocalServer

KEY, TITLE = "tables", "A step of an embedding, as its table grows"

_COLUMNS, _SHARDS = 4, 2
_WARMUP = 5
_MODEL_COPIES = (
    7  # that a step of a table takes at the most: worker, upload, two of the server's, and what is under way
)


class Point(NamedTuple):
    """A table, and the contender that steps it."""

    rows: int
    contender: str

    @property
    def table_bytes(self) -> int:
        return 4 * _COLUMNS * self.rows


class Measured(NamedTuple):
    """Seconds of each step, and bytes of the last one, both ways."""

    seconds: list[float]
    pushed: int = 0
    pulled: int = 0


Step = Callable[[], tuple[int, int]]

OURS, DENSE, TORCH = "ServerAdagrad, rows", "ASGD, whole gradients", "torch.optim.SparseAdam, one node"


def run(plan: Plan) -> Section:
    """Step each table by each contender, one after the other, each alone."""
    section = Section(KEY, TITLE)
    sizes = (100_000, 1_000_000) if plan.quick else (1_000_000, 10_000_000, 100_000_000)
    touched, steps = (1_000, 8) if plan.quick else (10_000, 40)
    points = [Point(rows, OURS) for rows in sizes]
    points += [Point(rows, TORCH) for rows in sizes]
    points += [Point(rows, DENSE) for rows in sizes[:2]]
    found: dict[Point, Measured] = {}
    for point in points:
        plan.say(f"{point.contender}, {point.rows:,} rows")
        need = _MODEL_COPIES * point.table_bytes
        if psutil.virtual_memory().available < need:
            section.notes.append(f"{point.rows:,} rows: not measured, {need / 1e9:.0f} GB of free memory are wanted.")
            continue
        if len(found) > 1 and not plan.has_time():
            section.notes.append(f"{point.contender}, {point.rows:,} rows: not measured, the time was over.")
            continue
        found[point] = _measure(point, touched, steps if point.contender != DENSE else max(4, steps // 8), plan.seed)
        gc.collect()
    rows = []
    for point, measured in found.items():
        first = found[Point(sizes[0], point.contender)]
        stat, base = Stat.of(measured.seconds), Stat.of(first.seconds)
        ratio = stat.median / base.median
        rows.append(
            (
                point.contender,
                f"{point.rows:,}",
                stat.milliseconds(),
                f"×{ratio:.2f}",
                f"×{stat.low / base.low:.2f}",
                f"{measured.pushed / 1e3:,.0f}" if measured.pushed else "",
                f"{measured.pulled / 1e3:,.0f}" if measured.pulled else "",
            )
        )
        section.figures[f"{point.contender}, {point.rows} rows"] = {
            "seconds": stat.plain(),
            "to_the_smallest_table": ratio,
            "fastest_to_fastest": stat.low / base.low,
            "push_bytes": measured.pushed,
            "pull_bytes": measured.pulled,
        }
    heads = ("by", "rows", "step, ms", "to the smallest", "fastest to fastest", "pushed, kB", "pulled, kB")
    section.tables.append(Table(f"{touched:,} random rows of {_COLUMNS} columns are touched in each step", heads, rows))
    section.notes += [
        f"A step is backward's gradient to parameters that are up to date, without forward and backward. {_SHARDS} "
        "shards on the same machine, one worker, exact replies. The goal: within ×1.2 from the smallest table to the "
        "largest.",
        "Bytes rise a little with the rows: more bits say which ones.",
    ]
    return section


def _measure(point: Point, touched: int, steps: int, seed: int) -> Measured:
    table = nn.EmbeddingBag(
        point.rows, _COLUMNS, mode="sum", sparse=point.contender != DENSE, _weight=torch.zeros(point.rows, _COLUMNS)
    )
    generator = torch.Generator().manual_seed(seed)
    measured = Measured([])
    with _stepper(point.contender, table) as step:
        for number in range(_WARMUP + steps if point.contender != DENSE else 1 + steps):
            table.zero_grad()
            words = torch.randint(0, point.rows, (touched // 10, 10), generator=generator)
            table(words).square().sum().add(table(words).sum()).backward()
            started = time.perf_counter()
            pushed, pulled = step()
            if number >= _WARMUP or (point.contender == DENSE and number):
                measured.seconds.append(time.perf_counter() - started)
                measured = measured._replace(pushed=pushed, pulled=pulled)
    return measured


@contextmanager
def _stepper(contender: str, table: nn.Module) -> Iterator[Step]:
    """Yield a function that takes a step, and returns the bytes it pushed and pulled."""
    if contender == TORCH:
        local = torch.optim.SparseAdam(table.parameters(), lr=0.01)

        def alone() -> tuple[int, int]:
            local.step()
            return 0, 0

        yield alone
        return
    make = partial(psclient.ServerAdagrad, density=1.0) if contender == OURS else psclient.ASGD
    with LocalServer(shards=_SHARDS) as server, make(table.parameters(), lr=0.01, model=table, server=server) as joined:

        def step() -> tuple[int, int]:
            joined.step()
            return joined.report.push_bytes, joined.report.pull_bytes

        yield step
