"""One worker of four is made ten times slower: what the others still get done.

A step lasts as long as on a device of known speed: a worker waits until its time is over before it hands its gradients
in. So the few cores of the machine do not decide, and the slow worker takes nothing from the others but what the method
makes them wait.
"""

import functools
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

from benchmarks.campaign.execute import server_settings
from benchmarks.campaign.journal import Journal
from benchmarks.campaign.methods import METHODS, VARIANTS
from benchmarks.campaign.processes import server
from benchmarks.campaign.spec import Form, Spec
from benchmarks.campaign.tasks import TASKS
from benchmarks.campaign.worker import CALL_SECONDS, Trainee
from benchmarks.harness import plots
from benchmarks.harness.children import Child, begin
from benchmarks.harness.section import Section, Table

WORKERS = 4
STEP_SECONDS = 0.05
SLOWNESS = 10
_TASK, _RATE = "digits", 0.03
_SETTLING_SECONDS = 1.5  # the first steps, in which the slow worker is not yet missed
_START_SECONDS = 60.0
_EXPECTED_SECONDS = 2.0  # beside the timed ones


@dataclass(frozen=True, slots=True)
class Effect:
    """Steps a second of the workers that are not slow, all together."""

    method: str
    alone: float
    beside_slow: float

    @property
    def share(self) -> float:
        """What is left of their throughput."""
        return self.beside_slow / self.alone


def measure(methods: Sequence[str], seconds: float, density: float, journal: Journal) -> list[Effect]:
    """Time every method that has a server, and what a bound, a quorum and rarer global rounds change in it."""
    chosen = [key for key in methods if METHODS[key].kind != "single"]
    chosen += [key for key, method in VARIANTS.items() if method in chosen]
    expected = seconds + _SETTLING_SECONDS + _EXPECTED_SECONDS
    journal.watcher.plan(2 * expected * len(chosen))
    effects = []
    for method in chosen:
        found = []
        for slowness in (1, SLOWNESS):
            key = json.dumps([method, slowness, seconds, density, METHODS[method].server(WORKERS)], sort_keys=True)
            words = f"slow worker: {METHODS[method].title}, {'with' if slowness > 1 else 'without'}"
            do = functools.partial(_timed, method, slowness, seconds, density)
            if kept := journal.once(key, words, expected, do):
                found.append(float(kept["steps_per_second"]))
        if len(found) == 2:
            effects.append(Effect(method, *found))
    return effects


def section(effects: Sequence[Effect]) -> Section:
    """Return the table and the picture."""
    found = Section("slow-worker", "One slow worker")
    rows = [
        (METHODS[each.method].title, f"{each.alone:.1f}", f"{each.beside_slow:.1f}", f"{each.share:.0%}")
        for each in effects
    ]
    if effects:
        title = f"{WORKERS} workers with steps of {STEP_SECONDS * 1e3:.0f} ms, one of them {SLOWNESS} times slower"
        found.tables.append(
            Table(f"{title}: steps a second of the others", ("", "all alike", "one slow", "left"), rows)
        )
        bars = [(METHODS[each.method].title, each.share) for each in effects]
        axis = "throughput of the others beside the slow worker"
        found.plots.append(plots.bars("compare-slow-worker", "One slow worker", title, axis, bars, percent=True))
        found.figures = {each.method: asdict(each) | {"share": each.share} for each in effects}
    return found


def _timed(method: str, slowness: int, seconds: float, density: float) -> dict[str, float]:
    total = _SETTLING_SECONDS + seconds
    samples = int(total / STEP_SECONDS) * WORKERS * TASKS[_TASK].batch_size
    momentum = METHODS[method].momenta[0]
    spec = Spec(_TASK, method, WORKERS, 0, samples, _RATE, momentum, Form(density), pace=STEP_SECONDS)
    with server(server_settings(spec)) as address, ExitStack() as stack:
        workers = [
            stack.enter_context(
                Child(f"worker {number} of {method}", work, spec, number, address, slowness * (number == WORKERS - 1))
            )
            for number in range(WORKERS)
        ]
        begin(workers, _START_SECONDS)
        rates = [worker.hear(CALL_SECONDS + total) for worker in workers]
    return {"steps_per_second": float(sum(rates[:-1]))}


def work(connection: Connection, spec: Spec, worker: int, address: str, slowness: int) -> None:
    """Train at the pace of the device for the given time, and tell how many steps a second that were."""
    trainee = Trainee(spec, worker, address)
    pace, total = spec.pace * max(1, slowness), spec.steps * spec.pace
    connection.send("ready")
    connection.recv()
    begun = now = settled = time.perf_counter()
    steps = 0
    while now < begun + total:
        trainee.gradient()
        time.sleep(max(0.0, now + pace - time.perf_counter()))  # the rest of the device's step
        trainee.step()
        now = time.perf_counter()
        if now < begun + _SETTLING_SECONDS:
            settled = now
        else:
            steps += 1
    trainee.end()
    connection.send(steps / (now - settled))
