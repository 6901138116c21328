"""What is run, in the order in which it answers the main question: does sparse both ways cost accuracy?"""

from collections.abc import Iterator
from typing import Any

from benchmarks.campaign.comparison import ASGD, Entrant, Stage
from benchmarks.campaign.spec import Form

FORMS = {
    "dense": Form(1.0, replies="exact"),
    "1 %": Form(0.01, replies="exact"),
    "1 %, top-k": Form(0.01, replies="topk"),
    "3 % of bytes": Form(budget=0.03),
    "3 % of bytes, residuals in bf16": Form(budget=0.03, residuals="bf16"),
    "1.2 % of bytes": Form(budget=0.012),
    "1.2 % of bytes, replies 5 %": Form(budget=0.012, reply_budget=0.05),
    "0.6 % of bytes": Form(budget=0.006),
    "0.3 % of bytes": Form(budget=0.003),
    "9 % in 4 bits, exact": Form(0.09, values="int4", replies="exact"),
}
"""How a method is run: budgets of bytes each way; the last is about the push of 3 %, with exact replies."""


def _entrants(method: str, *forms: str) -> tuple[Entrant, ...]:
    return tuple(Entrant(method, form) for form in forms)


_FIRST = (ASGD, *_entrants("rmsprop", "dense", "3 % of bytes"), *_entrants("gradient_dropping", "3 % of bytes"))
ROUNDS = (*_entrants("rmsprop_rounds", "dense", "3 % of bytes"), *_entrants("adamw_rounds", "dense"))
"""In rounds: sparse, dense, and the data-parallel AdamW that most people train with."""
MAIN = (
    *_FIRST,
    *ROUNDS,
    *_entrants("dgs", "3 % of bytes"),
    *(Entrant(method, "1 %") for method in ("rmsprop", "gradient_dropping", "dgs")),
)
_AHEAD = ("dgs_ahead", "dgc_ahead", "dropping_ahead")
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


POINTS = 8


def _stage(
    task: str, workers: int, entrants: tuple[Entrant, ...], samples: int, simulated: bool, **other: Any
) -> Stage:
    return Stage(task, workers, entrants, FORMS, samples, simulated, points=POINTS, **other)


WORKERS = (8, 4, 16, 1)

SAMPLES = {"text-tiny": 8192, "fashion-tiny": 55_000, "text": 81_920, "fashion": 1_100_000}
"""The two long ones: 20 passes over Fashion-MNIST, and 10,240 pushes."""

QUICK = (
    _stage("text-tiny", 4, _FIRST, 4096, simulated=True, momenta=1, seeds=(0, 1)),
    _stage("text-tiny", 4, _FIRST[:3], 4096, simulated=False, momenta=1, seeds=(0, 1)),
)

SMOKE = tuple(
    _stage(
        "text-tiny", 2, (ASGD, *_entrants("rmsprop", "3 % of bytes")), 256, simulated, momenta=1, seeds=(0,), rate=0.125
    )
    for simulated in (True, False)
)


HALVES = tuple(
    _stage(
        "text-tiny",
        8,
        _entrants(method, "3 % of bytes", "3 % of bytes, residuals in bf16"),
        8192,
        simulated=True,
        momenta=1,
        rate=rate,
    )
    for method, rate in (("gradient_dropping", 0.25), ("dgs", 0.125), ("dgc", 0.125))
)
"""Whether residuals and momenta in bf16 cost accuracy, at the rates that were found in fp32."""

SIZE = tuple(_stage("text", workers, ROUNDS, 8192, simulated=True, momenta=1, seeds=(0, 1)) for workers in WORKERS[:2])
"""Whether it holds for 17 times as many parameters."""


LOCAL = (
    _stage(
        "text-tiny",
        8,
        (
            *_entrants("adamw_rounds", "dense"),
            *_entrants("diloco_10", "dense"),
            *_entrants("local_10", "dense", "3 % of bytes"),
            *_entrants("local_4", "dense", "1.2 % of bytes", "1.2 % of bytes, replies 5 %"),
            *_entrants("local_2", "dense", "0.6 % of bytes"),
            *_entrants("local_1", "0.3 % of bytes"),
            *_entrants("rmsprop_rounds", "0.3 % of bytes"),
        ),
        64_000,
        simulated=True,
        momenta=1,
        seeds=(0, 1),
    ),
)
"""About a 300th of the bytes up, in seldom pushes of many entries or frequent ones of few."""


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
                yield _stage(
                    task,
                    workers,
                    (*alone, *entrants),
                    SAMPLES[task],
                    simulated,
                    momenta=2 if task.endswith("tiny") else 1,
                )
