"""All costs, measured on this machine, as the simulation takes them."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from benchmarks.scale import check, engine, overlap, transport
from benchmarks.scale.check import Case
from benchmarks.scale.costs import Costs
from benchmarks.scale.engine import Points
from benchmarks.scale.fits import Curve, growing_share, line, worst

_CENTS = 1.05  # densities nearer to one another than this are one point of a curve

_LONGEST_HANDOVER = 0.005  # seconds that Python lets a thread wait before it takes the lock from another
_HALVINGS = 10

_SERIAL = {"decode": "decode", "encode": "encode", "union": "union_sort", "select": "select_all"}
"""Whose line says what is fixed of a work that two threads did."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured.

    Attributes:
        sizes: of shards whose engine is measured, elements.
        densities: of pushes there.
        repeats: of each.
        served: sizes of models beside a real server.
        served_density: of pushes there.
        rounds: of that.
        worker_sizes: of models that a real worker trains.
        worker_steps: of each.
        trained: steps of each of eight workers whose pushes are laid over one another.
    """

    sizes: tuple[int, ...] = (500_000, 2_000_000, 16_000_000)
    densities: tuple[float, ...] = (0.001, 0.01)
    repeats: int = 7
    served: tuple[int, ...] = (200_000, 2_000_000, 12_000_000)
    served_density: float = 0.01
    rounds: int = 2
    worker_sizes: tuple[int, ...] = (1_000_000, 4_000_000, 16_000_000)
    worker_steps: int = 7
    trained: int = 24


QUICK = Extent((500_000, 2_000_000), (0.001, 0.01), 3, (200_000, 4_000_000), 0.01, 1, (1_000_000, 4_000_000), 3, 12)
SMOKE = Extent((100_000, 400_000), (0.001, 0.01), 2, (50_000, 400_000), 0.01, 1, (100_000, 400_000), 2, 4)


def measure(extent: Extent, seed: int, say: Callable[[str], None]) -> tuple[Costs, Points]:
    """Measure; return the costs, and the points that their lines were laid through."""
    work = engine.measure(extent.sizes, extent.densities, extent.repeats, seed, say)
    lines = _lines(work.points)
    costs = replace(
        Costs(**lines),
        index_bits=_curve(work.index_bits),
        push_frame=median(work.push_frame),
        pull_frame=median(work.pull_frame),
        serial={kind: growing_share(lines[_SERIAL[kind]], *found) for kind, found in work.serial.items()},
    )
    served = transport.measure(costs, extent.served, extent.served_density, extent.rounds, seed, say)
    say("a real worker")
    worked = transport.worker(extent.worker_sizes, extent.served_density, extent.worker_steps, seed)
    say("overlap of pushes in training")
    novelty = overlap.measure(extent.densities, extent.trained, seed)
    points = work.points | served.points | worked
    notes = {name: worst(line(found), found) for name, found in points.items()}
    costs = replace(
        costs,
        **_lines(served.points | worked),
        idle=median(served.idle),
        renewal=median(served.renewal),
        novelty=Curve(tuple(novelty), tuple(novelty.values())),
        crowding=max(0.0, median(served.crowding)),
        server_bytes=served.server_bytes,
        notes=notes,
    )
    say("handing the interpreter over")
    crowd = Case("crowd", min(extent.served), extent.served_density, 1, 0.0, "exact")
    return replace(costs, handover=handover(costs, crowd, median(served.crowded), os.cpu_count() or 1, seed)), points


def handover(costs: Costs, crowd: Case, rate: float, cores: int, seed: int) -> float:
    """Return what a handover of the interpreter takes for the simulation to be as fast as a real crowd was.

    Args:
        costs: all others.
        crowd: clients that wait for one another all the time.
        rate: their real steps a second.
        cores: that they and the server have.
        seed: of the simulations.
    """
    least, most = 0.0, _LONGEST_HANDOVER
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        found = check.replay(crowd, transport.CROWD, replace(costs, handover=middle), cores, seed)
        least, most = (middle, most) if found.steps_per_second > rate else (least, middle)
    return least


def _lines(points: Points) -> dict[str, Any]:
    return {name: line(found) for name, found in points.items()}


def _curve(points: list[tuple[float, float]]) -> Curve:
    """Join points whose densities hardly differ."""
    groups: list[list[tuple[float, float]]] = []
    for point in sorted(points):
        if groups and point[0] < _CENTS * groups[-1][0][0]:
            groups[-1].append(point)
        else:
            groups.append([point])
    return Curve(
        tuple(median(density for density, _ in group) for group in groups),
        tuple(median(bits for _, bits in group) for group in groups),
    )
