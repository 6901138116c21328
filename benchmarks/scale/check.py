"""The simulation against real runs: the same configuration, the same machine, the same minutes."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.harness.generators import Window
from benchmarks.scale.costs import Costs
from benchmarks.scale.model import Cluster, Outcome, simulate
from benchmarks.scale.real import Stage

SEEDS = 3
"""Simulations whose mean is compared: a real run is one draw of many."""

TARGET = 0.20
"""Relative error that is aimed at."""

_LEAST_STEPS = 40


@dataclass(frozen=True, slots=True)
class Case:
    """One model and think time, with several numbers of clients.

    Attributes:
        name: for the table.
        size: elements.
        density: of pushes.
        shards: servers.
        think: mean seconds.
        down_mode: of the servers.
        workers: clients, in turn.
    """

    name: str
    size: int
    density: float
    shards: int
    think: float
    down_mode: str
    workers: tuple[int, ...] = (1, 2, 4, 8, 16, 32)


CASES = (
    Case("exact, think 250 ms", 3_000_000, 0.005, 1, 0.25, "exact"),
    Case("auto, think 100 ms", 1_000_000, 0.01, 1, 0.1, "auto"),
    Case("two shards, think 100 ms", 3_000_000, 0.005, 2, 0.1, "exact"),
)
QUICK = (Case("think 100 ms", 1_000_000, 0.005, 1, 0.1, "exact", (1, 4, 16)),)

SMOKE = (Case("think 50 ms", 200_000, 0.005, 1, 0.05, "exact", (1, 2)),)


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration, really and simulated."""

    case: Case
    workers: int
    real: Window
    simulated: Outcome

    def errors(self) -> dict[str, float]:
        """Return the relative errors; of staleness over that of the real run, or over 1 where that is less."""
        real, found = self.real, self.simulated
        size = real.sent + real.received
        return {
            "throughput": found.steps_per_second / real.rate - 1,
            "staleness": (found.staleness - real.staleness) / max(1.0, real.staleness),
            "bytes": (found.sent + found.received) / size - 1,
        }

    def plain(self) -> dict[str, Any]:
        """Return what JSON can have."""
        return {
            "case": self.case.name,
            "workers": self.workers,
            "real": self.real._asdict(),
            "simulated": asdict(self.simulated),
            "errors": self.errors(),
        }


def run(
    cases: Sequence[Case], costs: Costs, cores: int, seconds: float, rounds: int, seed: int, say: Callable[[str], None]
) -> list[Row]:
    """Run every case and simulate it.

    Args:
        cases: what to run.
        costs: of this machine.
        cores: that servers and clients share.
        seconds: to watch each run; longer where that would be few steps.
        rounds: of each; the medians count.
        seed: of updates and simulations.
        say: shows what is going on.
    """
    rows = []
    for case in cases:
        with Stage(case.size, case.density, case.shards, max(case.workers), case.down_mode, seed) as stage:
            stage.warm_up(min(4, max(case.workers)))
            runs: dict[int, list[Window]] = {workers: [] for workers in case.workers}
            for turn in range(rounds):
                for workers in case.workers[:: -1 if turn % 2 else 1]:
                    say(f"real: {case.name}, {workers} clients, {turn + 1} of {rounds}")
                    enough = max(seconds, _LEAST_STEPS * case.think / workers)
                    runs[workers].append(stage.run(workers, case.think, enough))
        for workers, seen in runs.items():
            rows.append(Row(case, workers, _median(seen), replay(case, workers, costs, cores, seed)))
    return rows


def replay(case: Case, workers: int, costs: Costs, cores: int, seed: int) -> Outcome:
    """Simulate what :class:`~benchmarks.scale.real.Stage` runs."""
    cluster = Cluster(
        case.size,
        case.density,
        workers,
        case.shards,
        compute=case.think,
        server_cores=cores,
        down_mode=case.down_mode,
        replay=True,
        client_processes=min(2, workers),
        each_shard=True,
    )
    found = [simulate(cluster, costs, seed=seed + draw, counted=20) for draw in range(SEEDS)]
    return sorted(found, key=lambda outcome: outcome.steps_per_second)[SEEDS // 2]


def _median(seen: Sequence[Window]) -> Window:
    return Window(*(median(values) for values in zip(*seen, strict=True)))
