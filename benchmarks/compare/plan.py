"""How much is compared: what an hour allows, what five minutes do, and what seconds do."""

from dataclasses import dataclass

from benchmarks.campaign.comparison import Entrant, Stage
from benchmarks.campaign.methods import METHODS
from benchmarks.campaign.spec import Form

_EVIDENCE_ONLY = ("adam", "outer_sparse", "dgs_ahead", "dgc_ahead", "dropping_ahead")
_FORM = ""
"""Of every entrant: the plan's density, and replies as the server chooses."""


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
        search_samples: of one of the search.
        density: share of the entries that a sparse method sends, and of a top-k reply.
        momenta: how many are tried.
        straggler_seconds: how long each method is timed with and without a slow worker.
        variants: time there too what a bound, a quorum and rarer global rounds change.
    """

    tasks: tuple[str, ...] = ("digits", "language")
    methods: tuple[str, ...] = tuple(key for key in METHODS if key not in _EVIDENCE_ONLY)
    workers: tuple[int, ...] = (1, 2, 4, 8)
    tuned_at: tuple[int, ...] = (4, 8)
    seeds: tuple[int, ...] = (0, 1, 2)
    samples: int = 16_384
    search_samples: int = 8192
    density: float = 0.01
    momenta: int = 3
    straggler_seconds: float = 6.0
    variants: bool = True

    def stages(self) -> list[Stage]:
        """Return the runs, a task and a number of workers at a time: those that are paired lie close together."""
        found = []
        for task in self.tasks:
            for workers in sorted({1, *self.workers}):
                entrants = tuple(Entrant(key, _FORM) for key in self.methods if workers in self._workers_of(key))
                tuned_at = min((count for count in self.tuned_at if count >= workers), default=max(self.tuned_at))
                found.append(
                    Stage(
                        task,
                        workers,
                        entrants,
                        {_FORM: Form(self.density)},
                        self.samples,
                        simulated=False,
                        momenta=self.momenta,
                        seeds=self.seeds,
                        tuned_at=tuned_at,
                        search_samples=self.search_samples,
                        is_paced=False,
                    )
                )
        return [stage for stage in found if stage.entrants]

    def _workers_of(self, method: str) -> tuple[int, ...]:
        return (1,) if METHODS[method].kind == "single" else self.workers


FULL = Plan()
QUICK = Plan(
    workers=(4,), tuned_at=(4,), seeds=(0, 1), samples=3072, search_samples=1536, momenta=1, straggler_seconds=2.0
)
SMOKE = Plan(
    tasks=("digits",),
    methods=("asgd", "dgs"),
    workers=(2,),
    tuned_at=(2,),
    seeds=(0,),
    samples=512,
    search_samples=256,
    momenta=1,
    straggler_seconds=0.5,
    variants=False,
)
