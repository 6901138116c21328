"""Section *selection*: accumulating and selecting, against a copy of the tensor and the ways of others."""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from benchmarks.harness import plots
from benchmarks.harness.plots import Plot
from benchmarks.harness.section import Plan, Section, Table
from benchmarks.harness.timing import Case, Stat, Stopwatch, interleave, ratio
from benchmarks.sections import cuda_selection
from benchmarks.workload import captured
from benchmarks.workload.residual import Residual
from pscore.selection import SELECTORS, TOLERANCE, entries_for

KEY, TITLE = "selection", "Accumulating and selecting"

_RATE, _KEEP = 0.1, 0.7
_MODEL = 25_600_000
_SLOW_FROM = 10_000_000
_POOL = 1 << 22
_TOPK, _COPY, _BESIDE = "torch.topk", "copy", "copy beside topk"
_TEXTS = {
    _COPY: "copy of the tensor",
    "warm": "ours: warm threshold, one pass (default)",
    "ldte": "LDTE-BS",
    "exact": "exact: quickselect",
    _BESIDE: "copy, in turn with the next",
    _TOPK: "x.abs().topk(k), gather, clear",
}
_ROUNDING = 1e-9  # 11 of 10 are 10 % more, and 1.1 − 1 is not 0.1


def run(plan: Plan) -> Section:
    """Let every selector take steps of DGS on the same gradients."""
    section = Section(KEY, TITLE)
    for n, density in _grid(plan):
        if not plan.has_time(_seconds(n)):
            section.notes.append(f"No time was left for {n:,} elements at {density:.1%}.")
            continue
        plan.say(f"{n:,} elements, {density:.1%}")
        _measure(plan, section, n, density)
    section.plots += _plots(section)
    _real(plan, section)
    if torch.cuda.is_available():
        plan.say("CUDA")
        cuda_selection.measure(section, _MODEL, plan.rounds)
    else:
        section.notes.append(
            "CUDA: no device here, so the Triton kernels are not measured (docs/internals/kernels.md)."
        )
    section.notes += [
        "Every case accumulates a new gradient (Laplace noise), selects, cuts out, and leaves 0.7 of what it took: a "
        "whole step of DGS on one fp32 tensor. All in turn within one run; ratios are formed round by round, to the "
        "copy above.",
        f"{torch.get_num_threads()} threads. The copy moves 8 bytes an element (12 with what a write reads first), the "
        "one pass 12.",
    ]
    return section


def _grid(plan: Plan) -> Iterator[tuple[int, float]]:
    if plan.quick:
        yield from ((_MODEL, 0.01), (100_000, 0.01), (1_000_000, 0.01))
        return
    yield _MODEL, 0.01
    for n in (100_000, 1_000_000, 10_000_000):
        yield from ((n, density) for density in (0.1, 0.01, 0.001))
    yield from ((_MODEL, 0.1), (_MODEL, 0.001), (100_000_000, 0.01))


def _seconds(n: int) -> float:
    """What a point may take."""
    return 1 + 5e-7 * n


def _measure(plan: Plan, section: Section, n: int, density: float) -> None:
    k = entries_for(n, density)
    gradients = _gradients(n, plan.seed)
    counts: dict[str, list[float]] = {}
    cases: dict[str, Case] = {_COPY: _copy(n)}
    left_out: set[str] = set()
    if n > 2 * _MODEL:
        left_out = {"exact", _TOPK}
    for name in _TEXTS:
        if name in SELECTORS and name not in left_out:
            cases[name] = _selector(name, n, k, gradients, counts)
    fast = interleave(cases, 3 if n >= _SLOW_FROM else plan.rounds, warmup=6, has_time=plan.has_time)
    if _TOPK not in left_out:
        slow = {_BESIDE: cases[_COPY], _TOPK: _topk(n, k, gradients)}
        fast |= interleave(slow, 1 if n >= _SLOW_FROM else 3, warmup=1)
    rows = []
    for name, text in _TEXTS.items():
        if name not in fast:
            continue
        to_copy = ratio(fast, name, _BESIDE if name in (_BESIDE, _TOPK) else _COPY)
        found = counts.get(name, [])[6:]
        spread = f"{min(found):.2f}–{max(found):.2f}" if found else ("1.00" if name == _TOPK else "")
        rows.append(
            (text, Stat.of(fast[name]).milliseconds(), "" if name in (_COPY, _BESIDE) else to_copy.ratio(), spread)
        )
        section.figures[f"{name}, n={n}, density={density}"] = {
            "seconds": Stat.of(fast[name]).plain(),
            "to_copy": to_copy.plain(),
            "selected_to_wanted": found,
        }
    section.tables.append(Table(f"{n:,} elements, {density:.1%}: k = {k:,}", ("", "ms", "to a copy", "k̂/k"), rows))


def _gradients(n: int, seed: int) -> Callable[[int], torch.Tensor]:
    """Return gradients by the round: pieces of a pool of noise, laid end to end anew each time."""
    pool = torch.from_numpy(np.random.default_rng(seed).laplace(size=_POOL).astype(np.float32))
    gradient = torch.empty(n)
    drawn = -1

    def at(turn: int) -> torch.Tensor:
        nonlocal drawn
        if turn != drawn:
            drawn = turn
            for start in range(0, n, _POOL // 2):
                piece = gradient[start : start + _POOL // 2]
                first = (turn * 7919 + start // 3) % (_POOL // 2)
                piece.copy_(pool[first : first + piece.numel()])
        return gradient

    return at


def _copy(n: int) -> Case:
    source, target = torch.ones(n), torch.empty(n)

    def measure(_: int) -> None:
        target.copy_(source)

    return measure


def _selector(
    name: str, n: int, k: int, gradients: Callable[[int], torch.Tensor], counts: dict[str, list[float]]
) -> Case:
    residual = Residual(torch.zeros(n), k, SELECTORS[name], _KEEP)

    def measure(turn: int) -> dict[str, float]:
        gradient, watch = gradients(turn), Stopwatch()
        with watch.part("step"):
            taken = residual.step(gradient, _RATE)
        counts.setdefault(name, []).append(taken / k)
        return watch.parts

    return measure


def _topk(n: int, k: int, gradients: Callable[[int], torch.Tensor]) -> Case:
    memory = torch.ones(n).zero_()

    def measure(turn: int) -> dict[str, float]:
        gradient, watch = gradients(turn), Stopwatch()
        with watch.part("step"):
            memory.add_(gradient, alpha=_RATE)
            offsets = memory.abs().topk(k, sorted=False).indices
            values = memory[offsets]
            memory[offsets] = values * _KEEP
        return watch.parts

    return measure


def _plots(section: Section) -> list[Plot]:
    """Draw what a step costs against the size, at 1 %."""
    curves = []
    for name in (name for name in _TEXTS if name not in (_COPY, _BESIDE)):
        points = []
        for key, figure in section.figures.items():
            what, size, density = key.split(", ")
            if what == name and float(density.removeprefix("density=")) == 0.01:
                points.append((float(size.removeprefix("n=")), figure["to_copy"]["median"]))
        if len(points) > 1:
            curves.append(plots.Line(_TEXTS[name], sorted(points)))
    title = "Accumulate and select 1 %: time over that of a copy of the tensor"
    caption = "Median of the rounds; a step of DGS on one tensor, this machine's CPU."
    axes = ("elements", "copies")
    return [plots.lines("selection", title, caption, axes, curves, log_x=True, log_y=True)] if curves else []


def _real(plan: Plan, section: Section) -> None:
    """Follow the warm threshold over real training runs whose learning rate falls twice."""
    rows = []
    for name, make in captured.MODELS.items():
        for density in (0.01,) if plan.quick else (0.1, 0.01, 0.001):
            plan.say(f"training run: {name}, {density:.1%}")
            run = captured.train(
                make(plan.seed), density, 100 if plan.quick else 400, plan.seed, "warm", keep_every=100
            )
            within = sum(abs(each - 1) < TOLERANCE + _ROUNDING for each in run.ratios) / len(run.ratios)
            rows.append(
                (
                    f"{name}, {density:.1%}",
                    f"{len(run.ratios):,}",
                    f"{min(run.ratios):.3f}",
                    f"{max(run.ratios):.3f}",
                    f"{within:.1%}",
                )
            )
            section.figures[f"training run, {name}, {density}"] = {
                "selections": len(run.ratios),
                "least": min(run.ratios),
                "most": max(run.ratios),
                "within_tolerance": within,
                "loss": run.loss,
            }
    heads = ("run", "selections", "least k̂/k", "most", "within ±10 %")
    section.tables.append(
        Table("The warm threshold over whole training runs, two drops of the learning rate each", heads, rows)
    )
