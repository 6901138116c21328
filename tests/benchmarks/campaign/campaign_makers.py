"""Plans, runs and a watcher for the tests of the comparison."""

import itertools

from benchmarks.campaign import processes
from benchmarks.campaign.comparison import Cell, Comparison, Entrant
from benchmarks.campaign.journal import Journal
from benchmarks.campaign.spec import Form, Outcome, Run, Spec
from benchmarks.compare.stages import FORM, Plan
from psservice.storage.environment import MACHINE

SMALL = Plan(
    tasks=("digits",),
    methods=("sgd", "dgs", "asgd"),
    workers=(2, 4),
    tuned_at=(4,),
    seeds=(0, 1),
    samples=640,
)
STAGES = SMALL.stages(0.01)


class Silent:
    """Keeps what a watcher is told."""

    def __init__(self):
        self.planned = self.over = 0.0
        self.begun = []

    def plan(self, seconds):
        self.planned += seconds

    def say(self, what):
        self.begun.append(what)

    def done(self, planned, seconds):
        self.over += planned


def outcome(score=0.9, loss=0.3, **others):
    numbers = {"up_bytes": 1000, "down_bytes": 2000, "versions": 40, "mean_staleness": 1.5, "p99_staleness": 4.0}
    return Outcome(score, loss, **(numbers | {"refused": 0, "seconds": 1.0} | others))


def run(method="dgs", workers=4, seed=0, task="digits", **results):
    return Run(Spec(task, method, workers, seed, 640, 0.3, 0.6, Form(0.01)), outcome(**results))


def comparison(path, do):
    """A comparison that does runs so; without ``do`` it reads its journal alone."""
    return Comparison(Journal(path, Silent(), does=do is not None), do)


def keep(made, *runs):
    """Put runs into a comparison as if it had done them."""
    for each in runs:
        spec = each.spec
        place = Cell(spec.task, spec.simulated, spec.workers), Entrant(spec.method, FORM)
        made.runs.setdefault(place, {})[spec.seed] = each


def serve_while_time_jumps(*arguments):
    """Serve in this process, whose clock now and then moves by seconds at each of 20 looks at it."""
    looks, moment = itertools.count(), 0.0

    def clock():
        nonlocal moment
        moment += 5.0 if next(looks) % 100 >= 80 else 0.001
        return moment

    object.__setattr__(MACHINE, "monotonic", clock)
    processes._serve(*arguments)
