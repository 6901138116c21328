"""One worker of four is made ten times slower: what the others still get done.

A step lasts as long as on a device of known speed: a worker waits until its time is over before it hands its gradients
in. So the few cores of the machine do not decide, and the slow worker takes nothing from the others but what the method
makes them wait.
"""

import functools
import json
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

import psclient
from benchmarks.campaign.methods import METHODS, Method, Setup, in_groups, in_rounds
from benchmarks.campaign.processes import Child, server
from benchmarks.campaign.runner import Runner
from benchmarks.campaign.tasks import TASKS, loss_of
from benchmarks.campaign.worker import CALL_SECONDS, connection_to
from benchmarks.compare.plan import Plan

WORKERS = 4
STEP_SECONDS = 0.05
SLOWNESS = 10
_TASK, _RATE = "digits", 0.03
_SETTLING_SECONDS = 1.5  # the first steps, in which the slow worker is not yet missed
_START_SECONDS = 60.0
_EXPECTED_SECONDS = 2.0  # beside the timed ones

BOUNDED = Method(
    "asgd_bounded", "ASGD, --ssp-bound 4", METHODS["asgd"].make, (0.0,), server=lambda workers: {"ssp_bound": 4}
)
"""Timed here alone: a bound on clocks is what lets one slow worker hold the others of an asynchronous method."""

BACKED_UP = Method(
    "ssgd_backup",
    f"SSGD, {WORKERS - 1} of {WORKERS}",
    in_rounds(psclient.Rounds(quorum=WORKERS - 1)),
    kind="synchronous",
)
"""Timed here alone: with a backup worker a synchronous round does not wait for the slowest."""

RARELY_ALL = Method("wagma_rare", "WAGMA-SGD, τ = 1000", in_groups(tau=1000))
"""Timed here alone: groups do not wait, and the global rounds, which do, are left out."""

_ONLY_HERE = {method.key: method for method in (BOUNDED, BACKED_UP, RARELY_ALL)}


@dataclass(frozen=True, slots=True)
class Timing:
    """One timing: which method, and by how much one worker is slower."""

    method: str
    slowness: int
    seconds: float
    density: float


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


def measure(plan: Plan, runner: Runner, *, do: bool = True) -> list[Effect]:
    """Time every method that has a server; without ``do`` what was timed before is returned alone."""
    chosen = [METHODS[key] for key in plan.methods if METHODS[key].kind != "single"]
    chosen += _ONLY_HERE.values() if plan.variants else ()
    expected = plan.straggler_seconds + _SETTLING_SECONDS + _EXPECTED_SECONDS
    runner.watcher.plan(2 * expected * len(chosen))
    effects = []
    for method in chosen:
        found = []
        for slowness in (1, SLOWNESS):
            timing = Timing(method.key, slowness, plan.straggler_seconds, plan.density)
            key = json.dumps({"straggler": asdict(timing), "server": method.server(WORKERS)}, sort_keys=True)
            words = f"slow worker: {method.title}, {'with' if slowness > 1 else 'without'}"
            kept = runner.once(key, words, expected, functools.partial(_timed, method, timing) if do else None)
            if kept is not None:
                found.append(float(kept["steps_per_second"]))
        if len(found) == 2:
            effects.append(Effect(method.key, *found))
    return effects


def title_of(effect: Effect) -> str:
    """Return the method's name for readers."""
    return (METHODS | _ONLY_HERE)[effect.method].title


def _timed(method: Method, timing: Timing) -> dict[str, float]:
    return {"steps_per_second": _time(method, timing)}


def _time(method: Method, timing: Timing) -> float:
    with server({"down_density": timing.density, **method.server(WORKERS)}) as address, ExitStack() as stack:
        workers = [
            stack.enter_context(Child(f"worker {number} of {method.key}", work, timing, number, address))
            for number in range(WORKERS)
        ]
        for worker in workers:
            worker.hear(_START_SECONDS)
        for worker in workers:
            worker.tell()
        rates = [worker.hear(CALL_SECONDS + timing.seconds) for worker in workers]
        return float(sum(rates[:-1]))


def work(connection: Connection, timing: Timing, worker: int, address: str) -> None:
    """Train at the pace of the device for the given time, and tell how many steps a second that were."""
    method = (METHODS | _ONLY_HERE)[timing.method]
    task = TASKS[_TASK]
    model = task.initial_model(seed=0)
    draws = task.draws(0, worker, WORKERS)
    pace = STEP_SECONDS * (timing.slowness if worker == WORKERS - 1 else 1)
    total = _SETTLING_SECONDS + timing.seconds
    setup = Setup(
        model,
        _RATE * (1 - method.momenta[0]) * method.rate_scale,
        method.momenta[0],
        {"density": timing.density},
        int(total / STEP_SECONDS),
        WORKERS,
        connection_to(address, worker),
    )
    optimizer: Any = method.make(setup).optimizer
    connection.send("ready")
    connection.recv()
    begun = now = time.perf_counter()
    settled, steps = begun, 0
    while now < begun + total:
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, next(draws)))
        time.sleep(max(0.0, now + pace - time.perf_counter()))  # the rest of the device's step
        optimizer.step()
        now = time.perf_counter()
        if now < begun + _SETTLING_SECONDS:
            settled = now
        else:
            steps += 1
    optimizer.close()
    connection.send(steps / (now - settled))
