"""How much is compared: what an hour allows, what five minutes do, and what seconds do."""

from dataclasses import dataclass

from benchmarks.campaign.comparison import Entrant, Stage
from benchmarks.campaign.methods import METHODS
from benchmarks.campaign.spec import Form

FORM = ""
"""The name of every entrant's form: the density asked for, and replies as the server chooses."""

METHODS_COMPARED = ("sgd", "dgs", "dgc", "gradient_dropping", "asgd", "dc_asgd", "ssgd", "rmsprop", "outer", "wagma")


@dataclass(frozen=True, slots=True)
class Plan:
    """One comparison.

    Attributes:
        tasks: keys of the tasks.
        methods: keys of the methods.
        workers: how many, one comparison each.
        tuned_at: numbers of workers at which rate and momentum are searched.
        seeds: of the runs that count.
        samples: of a run that counts.
        momenta: how many are tried.
        timed_seconds: how long each method is timed with and without a slow worker.
    """

    tasks: tuple[str, ...] = ("digits", "language")
    methods: tuple[str, ...] = METHODS_COMPARED
    workers: tuple[int, ...] = (1, 2, 4, 8)
    tuned_at: tuple[int, ...] = (4, 8)
    seeds: tuple[int, ...] = (0, 1, 2)
    samples: int = 16_384
    momenta: int = 3
    timed_seconds: float = 6.0

    def stages(self, density: float) -> list[Stage]:
        """Return the runs, a task and a number of workers at a time: those that are paired lie close together."""
        return [
            Stage(
                task,
                workers,
                tuple(Entrant(key, FORM) for key in self.methods if workers in self._workers_of(key)),
                {FORM: Form(density)},
                self.samples,
                simulated=False,
                momenta=self.momenta,
                seeds=self.seeds,
                tuned_at=min((count for count in self.tuned_at if count >= workers), default=max(self.tuned_at)),
                search_samples=self.samples // 2,
                is_paced=False,
            )
            for task in self.tasks
            for workers in sorted({1, *self.workers})
        ]

    def _workers_of(self, method: str) -> tuple[int, ...]:
        return (1,) if METHODS[method].kind == "single" else self.workers


FULL = Plan()
QUICK = Plan(workers=(4,), tuned_at=(4,), seeds=(0, 1), samples=3072, momenta=1, timed_seconds=2.0)
SMOKE = Plan(("digits",), ("asgd", "dgs"), (2,), (2,), (0,), samples=512, momenta=1, timed_seconds=0.5)
