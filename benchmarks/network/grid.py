"""The speedups of all curves over all networks, from the model."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.network.costs import Curve, Measured
from benchmarks.network.model import Costs, Network, simulate

COMPUTE = 0.330
"""Seconds of a step's forward and backward pass, held fixed: ResNet-18 on ImageNet in the published setting."""

HIDING_COMPUTE, HIDING_RATE = 0.100, 1e9
"""Where the share of communication that overlap hides is told: a worker three times as fast on 1 Gbit/s."""

JITTER = 0.1
RATES = (100e6, 1e9, 10e9)


@dataclass(frozen=True, slots=True)
class Spot:
    """A place in the grid.

    Attributes:
        curve: how workers train.
        rate: bits a second of every link.
        delay: one way, seconds.
        workers: how many.
        full: with everything that was measured; without, bytes and delays alone cost time.
    """

    curve: Curve
    rate: float
    delay: float
    workers: int
    full: bool


def curves(*, quick: bool) -> list[Curve]:
    sparse = (("fp16", "exact"), ("fp16", "topk"), ("int8", "topk"), ("int4", "topk"))
    if quick:
        sparse = (sparse[0], sparse[1], sparse[3])
    return [
        Curve("fp32", "dense"),
        *(Curve(value_type, down, overlap) for value_type, down in sparse for overlap in (False, True)),
    ]


def speedups(measured: Measured, spots: Sequence[Spot], draws: int) -> dict[Spot, float]:
    """Return steps a second over those of one machine that communicates with nobody."""
    found = {}
    costs: dict[tuple[Curve, bool], Costs] = {}
    for spot in spots:
        key = spot.curve, spot.full
        if key not in costs:
            costs[key] = (measured.costs if spot.full else measured.bytes_alone)(spot.curve)
        network = Network(spot.rate / 8, spot.delay)
        outcome = simulate(
            costs[key], network, spot.workers, COMPUTE, overlap=spot.curve.overlap, jitter=JITTER, draws=draws
        )
        found[spot] = outcome.steps_per_second * COMPUTE
    return found


def hidden(costs: Costs, workers: int) -> float:
    """Return the share of what a step takes beyond its compute time that is gone with overlap."""
    network = Network(HIDING_RATE / 8)
    plain, overlapped = (
        simulate(costs, network, workers, HIDING_COMPUTE, overlap=overlap).step_seconds - HIDING_COMPUTE
        for overlap in (False, True)
    )
    return 1 - max(0.0, overlapped) / plain
