"""What is run, in the order in which it answers the main question: does sparse both ways cost accuracy?"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.compare.spec import Form
from benchmarks.compare.tasks import TASKS

FORMS = {
    "dense": Form(1.0, replies="exact"),
    "1 %": Form(0.01, replies="exact"),
    "1 %, top-k": Form(0.01, replies="topk"),
    "3 % of bytes": Form(budget=0.03),
    "9 % in 4 bits, exact": Form(0.09, values="int4", replies="exact"),
}
"""How a method is run: the fourth is the budget of bytes each way, the fifth about the same push with exact replies."""


class Entrant(NamedTuple):
    """A method, and the name of its form."""

    method: str
    form: str

    @property
    def twin(self) -> "Entrant | None":
        """The same method without sparseness; none for a dense one."""
        return None if self.form == "dense" else Entrant(_TWINS.get(self.method, self.method), "dense")


_AHEAD = ("dgs_ahead", "dgc_ahead", "dropping_ahead")
_TWINS = dict.fromkeys(("dgs", "dgc", "gradient_dropping", *_AHEAD), "asgd") | {"outer_sparse": "outer"}
ASGD = Entrant("asgd", "dense")


def _entrants(method: str, *forms: str) -> tuple[Entrant, ...]:
    return tuple(Entrant(method, form) for form in forms)


_FIRST = (ASGD, *_entrants("rmsprop", "dense", "3 % of bytes"), *_entrants("gradient_dropping", "3 % of bytes"))
MAIN = (
    *_FIRST,
    *_entrants("dgs", "3 % of bytes"),
    *(Entrant(method, "1 %") for method in ("rmsprop", "gradient_dropping", "dgs")),
)
OTHERS = (
    *(Entrant(method, form) for method in _AHEAD for form in ("3 % of bytes", "1 %")),
    *_entrants("dgc", "3 % of bytes", "1 %"),
    *_entrants("adam", "dense", "3 % of bytes", "1 %, top-k"),
    *_entrants("ssgd", "dense"),
    *_entrants("wagma", "dense"),
    *_entrants("outer", "dense"),
    *_entrants("outer_sparse", "3 % of bytes", "1 %"),
)
REPLIES = tuple(
    Entrant(method, form)
    for method in ("dgs", "dgc", "gradient_dropping", "rmsprop")
    for form in ("1 %, top-k", "9 % in 4 bits, exact")
)
"""Each sparse method with the replies that it does not have above: like is compared with like.

Adam of torch changes every parameter at each push, so an exact reply to it is the whole model: it gets top-k alone.
"""


@dataclass(frozen=True, slots=True)
class Stage:
    """Some methods on one task with one number of workers.

    Attributes:
        samples: of all workers together.
        simulated: see :class:`~benchmarks.compare.spec.Spec`.
        momenta: search the momentum too, not the rate alone.
        rate: effective learning rate of all runs; ``None`` to search one for each.
    """

    task: str
    workers: int
    entrants: tuple[Entrant, ...]
    samples: int
    simulated: bool
    momenta: bool = True
    seeds: tuple[int, ...] = (0, 1, 2)
    rate: float | None = None

    @property
    def pace(self) -> float:
        """A worker's step lasts as long as the machine needs for a step of every worker; one alone waits for none."""
        task = TASKS[self.task]
        return (
            0.0
            if self.simulated or self.workers == 1
            else self.workers * task.batch_size * task.expected_seconds / 1000
        )


WORKERS = (8, 4, 16, 1)

SAMPLES = {"text-tiny": 8192, "fashion-tiny": 55_000, "text": 81_920, "fashion": 1_100_000}
"""The two long ones: 20 passes over Fashion-MNIST, and 10,240 pushes."""

QUICK = (
    Stage("text-tiny", 4, _FIRST, 4096, simulated=True, momenta=False, seeds=(0, 1)),
    Stage("text-tiny", 4, _FIRST[:3], 4096, simulated=False, momenta=False, seeds=(0, 1)),
)

SMOKE = tuple(
    Stage("text-tiny", 2, (ASGD, *_entrants("rmsprop", "3 % of bytes")), 256, simulated, False, seeds=(0,), rate=0.125)
    for simulated in (True, False)
)


def full() -> Iterator[Stage]:
    """Yield the main question's runs, from the short to the long; then all other methods and replies alike."""
    for entrants in (MAIN, (*OTHERS, *REPLIES)):
        for task, simulated in (
            ("text-tiny", True),
            ("fashion-tiny", True),
            ("text-tiny", False),
            ("fashion", False),
            ("text", False),
        ):
            for workers in WORKERS:
                alone = _entrants("sgd", "dense") if workers == 1 and entrants is MAIN else ()
                yield Stage(task, workers, (*alone, *entrants), SAMPLES[task], simulated, momenta=task.endswith("tiny"))
