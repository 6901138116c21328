"""Section 3: where the time of a worker's ``step()`` goes, with a real server process on loopback."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

import psclient
from benchmarks.harness.section import Plan, Section, Table
from benchmarks.harness.timing import Rounds, Stat, ratio
from benchmarks.workload.layouts import noise_push, small_llama
from benchmarks.workload.synthetic import Noise, SyntheticModel
from psclient.optim.base import ParameterServerOptimizer
from pscore.selection import DEFAULT_DENSE_BELOW

KEY, TITLE = "client", "Where a worker's step() spends its time"

_WARMUP = 10  # steps until the thresholds have found their level
_COPY, _BARE, _WHOLE = "copy of the model", "bare index_add_", "step(), everything"
_PHASE = "phase."
_PHASES = {
    "phase.select": "accumulate, select, cut out",
    "phase.encode": "write chunks",
    "phase.send": "hand chunks to the transport",
    "phase.wait": "acknowledgement and reply",
    "phase.apply": "decode the reply, write it",
    "phase.rest": "check gradients, clip, join",
}
_WIRE = ("push_bytes", "pull_bytes")
_HEADS = ("what", "ms", "share", "to a copy")


def run(plan: Plan) -> Section:
    """Take sparse steps, then a few dense ones for comparison."""
    section = Section(KEY, TITLE)
    every = torch.get_num_threads()
    threads = (every, 1) if every > 1 else (1,)
    sparse = _steps(plan, "dgs", plan.slow_rounds, threads)
    dense = _steps(plan, "asgd", 1 if plan.quick else 3, (every,))
    tuned = plan if plan.quick else replace(plan, layout=small_llama(), layout_name="Llama")
    budget = _steps(tuned, "budget", plan.slow_rounds, (1,))[1]
    for count in threads:
        section.tables.append(_table(plan, sparse[count], count))
    size = f"{tuned.layout_name} of {tuned.layout.size / 1e6:.1f} M parameters"
    title = f"{size}, ServerRMSprop at 3 % of the bytes (10 % selected), one worker, 1 torch thread"
    section.tables.append(Table(title, _HEADS, _rows(budget, (_COPY, _WHOLE, *_PHASES))))
    whole = Table("A dense step (ASGD) for comparison", _HEADS, _rows(dense[every], (_COPY, _WHOLE)))
    section.tables.append(whole)
    measured = {"sparse": sparse[every], "dense": dense[every], "budget": budget}
    wire = {name: _median_wire(rounds) for name, rounds in measured.items()}
    noise = {count: Stat.of(sparse[count][_COPY]).spread for count in threads}
    section.figures = {
        **{f"sparse, {count} threads": _figures(sparse[count]) for count in threads},
        f"dense, {every} threads": _figures(dense[every]),
        "budget, 1 thread": _figures(budget),
        "wire": wire,
        "noise": {str(count): spread for count, spread in noise.items()},
    }
    section.notes += [
        f"{len(sparse[every][_WHOLE])} steps each after {_WARMUP} of warm-up, the thread counts in turn within one "
        "run. Gradients are Laplace noise. The only worker, so the reply is its own push. The server shares the "
        "machine's cores; where other programs do too, every operation of several threads waits for the slowest.",
        "Selection is the default: the warm threshold, tensor by tensor.",
        *(
            f"On the wire, as step() reported: {name} push {each['push_bytes'] / 1e6:.2f} MB, pull "
            f"{each['pull_bytes'] / 1e6:.2f} MB."
            for name, each in wire.items()
        ),
        "Noise: the same copy, once a step, took up to "
        + " and ".join(f"×{spread:.1f} ({count} threads)" for count, spread in noise.items())
        + " its shortest time.",
    ]
    return section


def _table(plan: Plan, rounds: Rounds, threads: int) -> Table:
    title = f"{plan.layout_name}, DGS at {plan.density:.0%}, one worker, {threads} torch thread(s)"
    return Table(title, _HEADS, _rows(rounds, (_COPY, _BARE, _WHOLE, *_PHASES)))


def _rows(rounds: Rounds, names: Sequence[str]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name in names:
        share = Stat.of([a / b for a, b in zip(rounds[name], rounds[_WHOLE], strict=True)])
        rows.append(
            (
                f"  {name.removeprefix(_PHASE)}: {_PHASES[name]}" if name in _PHASES else name,
                Stat.of(rounds[name]).milliseconds(),
                f"{share.median:.1%}" if name in _PHASES else "",
                "" if name == _COPY else ratio(rounds, name, _COPY).ratio(),
            )
        )
    return rows


def _figures(rounds: Rounds) -> dict[str, object]:
    return {
        name: {"seconds": Stat.of(values).plain(), "to_copy": ratio(rounds, name, _COPY).plain()}
        for name, values in rounds.items()
        if name not in _WIRE
    }


def _median_wire(rounds: Rounds) -> dict[str, float]:
    return {name: Stat.of(rounds[name]).median for name in _WIRE}


def _steps(plan: Plan, method: str, steps: int, threads: Sequence[int]) -> dict[int, Rounds]:
    """Take steps with each thread count in turn; return seconds (and bytes) by thread count."""
    model = SyntheticModel(plan.layout)
    noise = Noise(plan.layout, plan.seed)
    yardstick = _yardstick(plan)
    rounds: dict[int, Rounds] = {count: {} for count in threads}
    plan.say(f"{method}: start the server, upload")
    with psclient.LocalServer() as server, _optimizer(method, model, plan, server) as optimizer:
        assert [name for name, _ in model.named_parameters()] == [spec.name for spec in plan.layout.parameters]
        for turn in range(_WARMUP + steps):
            if turn > _WARMUP and not plan.has_time():
                break
            for count in threads:
                plan.say(f"{method}: step {turn + 1} of {_WARMUP + steps}, {count} threads")
                noise.fill(model)
                torch.set_num_threads(count)
                measured = _step(optimizer, next(yardstick))
                torch.set_num_threads(threads[0])
                if turn >= _WARMUP:
                    for name, value in measured.items():
                        rounds[count].setdefault(name, []).append(value)
    return rounds


def _step(optimizer: ParameterServerOptimizer, beside: dict[str, float]) -> dict[str, float]:
    started = time.perf_counter()
    optimizer.step(samples=1)
    whole = time.perf_counter() - started
    report = optimizer.report
    phases = {_PHASE + phase: seconds for phase, seconds in report.seconds.items() if _PHASE + phase in _PHASES}
    phases[_PHASE + "rest"] = max(0.0, whole - sum(report.seconds.values()))
    return {**beside, _WHOLE: whole, **phases, "push_bytes": report.push_bytes, "pull_bytes": report.pull_bytes}


def _optimizer(
    method: str, model: torch.nn.Module, plan: Plan, server: psclient.LocalServer
) -> ParameterServerOptimizer:
    if method == "asgd":
        return psclient.ASGD(model.parameters(), lr=0.01, model=model, server=server, worker="bench")
    if method == "budget":
        return psclient.ServerRMSprop(model, budget=0.03, server=server, worker="bench")
    return psclient.DGS(model.parameters(), lr=0.01, density=plan.density, model=model, server=server, worker="bench")


def _yardstick(plan: Plan) -> Iterator[dict[str, float]]:
    """Yield the times of a copy of the model and of a bare ``index_add_`` of a push, again and again."""
    source, target = torch.ones(plan.layout.size), torch.empty(plan.layout.size)
    rng = np.random.default_rng(plan.seed)
    while True:
        push = noise_push(plan.layout, plan.density, DEFAULT_DENSE_BELOW, rng)
        assert push.offsets is not None
        started = time.perf_counter()
        target.copy_(source)
        copied = time.perf_counter()
        target.index_add_(0, push.offsets, push.values, alpha=-1)
        yield {_COPY: copied - started, _BARE: time.perf_counter() - copied}
