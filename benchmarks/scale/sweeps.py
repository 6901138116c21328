"""What is varied: workers, shards, networks, densities; and what saturates where."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.scale.costs import VALUE_BYTES, Costs
from benchmarks.scale.model import Cluster, Outcome, simulate

ELEMENTS = 1_000_000_000
COMPUTE = 4.0
"""Seconds of a step of the sweeps, selection apart."""

IMAGE_ELEMENTS, IMAGE_COMPUTE = 11_689_512, 0.330
"""ResNet-18 on ImageNet: parameters, and seconds of a forward and backward pass in the published setting."""

CORES = 16
"""Of a server."""

ROOM_BYTES = 64 * 2.0**30
"""That calls may occupy in a server of the sweeps; the default is 1 GiB."""

BUSY = 0.9
"""Use from which a resource counts as saturated: queues have taken over there, though the last tenth is not used."""

EFFICIENT = 0.8
"""Speedup over workers that a cluster is to keep."""

PUBLISHED_WORKERS = (1, 2, 4, 8, 16)
PUBLISHED = {
    1e9: {"DGS": (1.00, 1.99, 3.87, 7.33, 12.61), "ASGD": (0.30, 0.44, 0.73, 0.89, 0.86)},
    10e9: {"DGS": (1.00, 2.00, 3.99, 7.68, 13.97), "ASGD": (0.68, 1.28, 2.31, 3.28, 3.91)},
}
"""ImageNet, ResNet-18, over one worker, by bits a second of the links: Yan et al., "Dual-Way Gradient Sparsification
for Asynchronous Distributed Deep Learning", ICPP 2020."""

_GIGABIT = 1e9 / 8
_MANY = 300  # workers of which fewer steps are as many


@dataclass(frozen=True, slots=True)
class Grid:
    """What is varied, one thing at a time.

    Attributes:
        workers: numbers of them.
        shards: likewise.
        densities: of pushes and of top-k replies.
        server_gigabits: a second, of a server's card.
        saturating_workers: where the first saturated resource is looked for.
        saturating_shards: that are tried against it.
        bandwidths: bits a second of every card, beside which few workers train a model of images.
        few_workers: their numbers.
    """

    workers: tuple[int, ...] = (1, 10, 30, 100, 300, 1000)
    shards: tuple[int, ...] = (1, 4, 16, 64)
    densities: tuple[float, ...] = (0.001, 0.01)
    server_gigabits: tuple[int, ...] = (1, 10, 25, 100)
    saturating_workers: tuple[int, ...] = (1, 3, 10, 20, 30, 50, 100, 200, 300, 1000)
    saturating_shards: tuple[int, ...] = (1, 4, 16, 64)
    bandwidths: tuple[float, ...] = (100e6, 1e9, 10e9)
    few_workers: tuple[int, ...] = (1, 2, 4, 8, 16)


QUICK = Grid(
    workers=(1, 10, 100, 1000),
    shards=(1, 16, 64),
    densities=(0.001,),
    server_gigabits=(1, 25),
    saturating_workers=(1, 10, 100, 1000),
    saturating_shards=(1, 16, 64),
)

SMOKE = replace(QUICK, workers=(1, 10), shards=(1, 4), saturating_workers=(1, 10), saturating_shards=(1, 4))


@dataclass(frozen=True, slots=True)
class Found:
    cluster: Cluster
    outcome: Outcome
    alone: float
    """Seconds of a step of one worker, all else being the same."""

    @property
    def speedup(self) -> float:
        """Steps a second over those of one worker."""
        return self.outcome.steps_per_second * self.alone

    @property
    def efficiency(self) -> float:
        """Speed-up over workers."""
        return self.speedup / self.cluster.workers

    @property
    def busiest(self) -> tuple[str, float]:
        """The resource that is used most, and how much."""
        name = max(self.uses, key=lambda name: self.uses[name])
        return name, self.uses[name]

    @property
    def uses(self) -> dict[str, float]:
        """Use of each resource: a server's, and a worker's card."""
        sent, received = self.outcome.sent, self.outcome.received
        steps = self.outcome.steps_per_second / self.cluster.workers
        return self.outcome.used | {"worker's card": max(sent, received) * steps / self.cluster.worker_rate}

    @property
    def server_bits(self) -> tuple[float, float]:
        """Bits a second of each server, in and out."""
        rate = 8 * self.outcome.steps_per_second / self.cluster.shards
        return rate * self.outcome.sent, rate * self.outcome.received

    @property
    def worker_bits(self) -> tuple[float, float]:
        """Bits a second of each worker, out and in."""
        rate = 8 * self.outcome.steps_per_second / self.cluster.workers
        return rate * self.outcome.sent, rate * self.outcome.received

    def plain(self) -> dict[str, Any]:
        return {
            "cluster": asdict(self.cluster),
            "outcome": asdict(self.outcome),
            "efficiency": self.efficiency,
            "server_bits_per_second": self.server_bits,
            "worker_bits_per_second": self.worker_bits,
            "memory_bytes": memory(self.cluster, self.outcome),
        }


class Sweeper:
    """Simulates, each configuration once.

    Args:
        costs: of this machine.
        seed: of the simulations.
        say: shows what is going on.
    """

    def __init__(self, costs: Costs, seed: int, say: Callable[[str], None]) -> None:
        self.costs, self._seed, self._say = costs, seed, say
        self._known: dict[tuple[Cluster, bool], Outcome] = {}

    def at(self, cluster: Cluster, *, free: bool = False) -> Found:
        """Simulate a cluster, and one worker of it; ``free`` of all costs but the network's."""
        alone = self._outcome(replace(cluster, workers=1), free)
        return Found(cluster, self._outcome(cluster, free), alone.step_seconds)

    def along(self, cluster: Cluster, workers: Sequence[int], *, free: bool = False) -> list[Found]:
        """Simulate a cluster with several numbers of workers."""
        return [self.at(with_workers(cluster, count), free=free) for count in workers]

    def _outcome(self, cluster: Cluster, free: bool) -> Outcome:
        key = cluster, free
        if key not in self._known:
            self._say(f"simulated: {cluster.workers} workers, {cluster.shards} shards, {cluster.density:.1%}")
            costs = self.costs.free() if free else self.costs
            self._known[key] = simulate(
                cluster, costs, seed=self._seed, warm=3, counted=3 if cluster.workers < _MANY else 2
            )
        return self._known[key]


def base(density: float, shards: int, server_gigabits: float = 25, down_mode: str = "auto") -> Cluster:
    """Return the cluster that sweeps begin from, of one worker, whose card has 10 Gbit/s."""
    rates = {"server_rate": server_gigabits * _GIGABIT, "worker_rate": 10 * _GIGABIT}
    return Cluster(ELEMENTS, density, 1, shards, COMPUTE, server_cores=CORES, down_mode=down_mode, **rates)


def on_images(bits: float, density: float, down_mode: str, *, overlap: bool = False) -> Cluster:
    """Return one worker and one server that train ResNet-18 on ImageNet, with cards of a rate."""
    rate = {"server_rate": bits / 8, "worker_rate": bits / 8, "compute": IMAGE_COMPUTE}
    return Cluster(IMAGE_ELEMENTS, density, 1, server_cores=CORES, down_mode=down_mode, overlap=overlap, **rate)


def with_workers(cluster: Cluster, workers: int) -> Cluster:
    """Return it with so many workers, and servers with room enough for their calls."""
    return replace(cluster, workers=workers, inflight_bytes=ROOM_BYTES)


@dataclass(frozen=True, slots=True)
class Saturation:
    """Where a cluster stops growing.

    Attributes:
        cluster: of one worker.
        workers: the first number with a saturated resource; 0 where there is none.
        resource: which.
        most: workers of the last number that keeps the efficiency.
        shards: that keep a thousand workers efficient; 0 where the largest number does not.
        at_thousand: what is busiest with the largest number of shards and workers, and how much.
    """

    cluster: Cluster
    workers: int
    resource: str
    most: int
    shards: int
    at_thousand: tuple[str, float]


def saturation(sweeper: Sweeper, cluster: Cluster, shards: Sequence[int], workers: Sequence[int]) -> Saturation:
    """Find where the first resource saturates, and how many shards move that beyond the largest number of workers."""
    first, resource, most = 0, "", 0
    for found in sweeper.along(cluster, workers):
        if found.efficiency >= EFFICIENT:
            most = found.cluster.workers
        name, used = found.busiest
        if used >= BUSY and not first:
            first, resource = found.cluster.workers, name
        if first and found.efficiency < EFFICIENT:
            break
    enough, last = 0, ("", 0.0)
    for count in shards:
        found = sweeper.at(with_workers(replace(cluster, shards=count), max(workers)))
        last = found.busiest
        if found.efficiency >= EFFICIENT:
            enough = count
            break
    return Saturation(cluster, first, resource, most, enough, last)


def memory(cluster: Cluster, outcome: Outcome, server_bytes: float = 0.0) -> float:
    """Return the bytes that a shard occupies: its parameters, the ledger's offsets, images, calls.

    Args:
        cluster: whose shard.
        outcome: which says how many workers are answered top-k, and what calls occupy.
        server_bytes: of the process itself.
    """
    images = cluster.workers * outcome.topk
    calls = outcome.used["memory of calls"] * cluster.inflight_bytes
    return server_bytes + VALUE_BYTES * cluster.part * (2 + images) + calls
