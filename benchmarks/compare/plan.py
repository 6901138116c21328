"""How much is compared: what an hour allows, and what five minutes do."""

from dataclasses import dataclass

from benchmarks.compare.methods import METHODS, Method

_EVIDENCE_ONLY = ("adam", "outer_sparse", "dgs_ahead", "dgc_ahead", "dropping_ahead")


@dataclass(frozen=True, slots=True)
class Plan:
    """One comparison.

    Attributes:
        quick: it is the short one.
        tasks: keys of the tasks.
        methods: keys of the methods.
        workers: how many, one comparison each.
        tuned_at: numbers of workers at which rate and momentum are searched.
        seeds: of the runs that count.
        search_seed: of those of the search: another.
        samples: of a run that counts.
        search_samples: of one of the search.
        density: share of the entries that a sparse method sends, and of a top-k reply.
        momenta: search the momentum too.
        straggler_seconds: how long each method is timed with and without a slow worker.
        variants: time there too what a bound, a quorum and rarer global rounds change.
    """

    quick: bool
    tasks: tuple[str, ...] = ("digits", "language")
    methods: tuple[str, ...] = tuple(key for key in METHODS if key not in _EVIDENCE_ONLY)
    workers: tuple[int, ...] = (1, 2, 4, 8)
    tuned_at: tuple[int, ...] = (4, 8)
    seeds: tuple[int, ...] = (0, 1, 2)
    search_seed: int = 100
    samples: int = 16_384
    search_samples: int = 8192
    density: float = 0.01
    momenta: bool = True
    straggler_seconds: float = 6.0
    variants: bool = True

    def workers_of(self, method: Method) -> tuple[int, ...]:
        """Return with how many workers a method is run."""
        return (1,) if method.kind == "single" else self.workers

    def tuned_for(self, method: Method, workers: int) -> int:
        """Return at how many workers the settings for so many are searched: so many, or the next above."""
        if method.kind == "single":
            return 1
        return min((count for count in self.tuned_at if count >= workers), default=max(self.tuned_at))

    def momenta_of(self, method: Method) -> tuple[float, ...]:
        return method.momenta if self.momenta else method.momenta[:1]


FULL = Plan(quick=False)
QUICK = Plan(
    quick=True,
    workers=(4,),
    tuned_at=(4,),
    seeds=(0, 1),
    samples=3072,
    search_samples=1536,
    momenta=False,
    straggler_seconds=2.0,
)
SMOKE = Plan(
    quick=True,
    tasks=("digits",),
    methods=("asgd", "dgs"),
    workers=(2,),
    tuned_at=(2,),
    seeds=(0,),
    samples=512,
    search_samples=256,
    momenta=False,
    straggler_seconds=0.5,
    variants=False,
)
