"""What a selection costs on captured steps: LDTE-BS as published, ``torch.topk``, and the selectors of this library."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.harness.timing import Case, Rounds, Stat, Stopwatch, interleave, ratio
from benchmarks.ldte import published, rivals
from benchmarks.ldte.capture import MOMENTUM, RATE, Moment
from benchmarks.workload.residual import Residual
from pscore.selection import DEFAULT_DENSE_BELOW, SELECTORS, entries_for

TOPK, LDTE = "torch.topk", "LDTE-BS"
PLAIN: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    TOPK: published.radix_select,
    LDTE: published.select,
}
OURS = ("exact", "sampled", "trimmed", "ldte", "warm")
MERGED, BY_TENSOR = "merged", "by tensor"
_WARMUP = 2


@dataclass
class Timing:
    """One model, one density, one way to lay the tensors.

    Attributes:
        over: :data:`MERGED`, all in one vector, or :data:`BY_TENSOR`.
        density: selected.
        device: what it ran on.
        elements: in all vectors together.
        vectors: how many are selected from.
        step: seconds of a step (accumulate, select, take out), by method.
        selecting: seconds of the selection alone, where a method has it apart.
        times: how many times as fast a step is as with ``torch.topk``, formed round by round.
        published: the same of the selection alone, LDTE-BS in plain torch: the ratio that was published.
        selected: entries taken over those asked for, least and most, by method.
    """

    over: str
    density: float
    device: str
    elements: int
    vectors: int
    step: dict[str, Any] = field(default_factory=dict)
    selecting: dict[str, Any] = field(default_factory=dict)
    times: dict[str, Any] = field(default_factory=dict)
    published: dict[str, Any] = field(default_factory=dict)
    selected: dict[str, list[float]] = field(default_factory=dict)


def measure(
    moments: Sequence[Moment],
    over: str,
    density: float,
    rounds: int,
    device: torch.device,
) -> Timing:
    """Time a step of every method on the same captured steps, one method after the other, round by round.

    Args:
        moments: steps that followed one another; a round takes the next of them.
        over: :data:`MERGED` or :data:`BY_TENSOR` (those that are large enough to be selected from).
        density: to select.
        rounds: that count.
        device: to run on.
    """
    steps = [_laid(moment, over, device) for moment in moments]
    memories = [memory.clone() for memory in steps[0][0]]
    sizes = [memory.numel() for memory in memories]
    wanted = [entries_for(size, density) for size in sizes]
    timing = Timing(over, density, _name(device), sum(sizes), len(sizes))
    taken: dict[str, list[float]] = {}

    def restored(turn: int) -> list[torch.Tensor]:
        before, gradients = steps[turn % len(steps)]
        for memory, source in zip(memories, before, strict=True):
            memory.copy_(source)
        _wait(device)
        return gradients

    def plain(name: str) -> Case:
        def case(turn: int) -> dict[str, float]:
            gradients, watch, count = restored(turn), Stopwatch(), 0
            for memory, gradient, k in zip(memories, gradients, wanted, strict=True):
                with watch.part("accumulate"):
                    memory.add_(gradient, alpha=RATE)
                    _wait(device)
                with watch.part("select"):
                    offsets = PLAIN[name](memory, k)
                    _wait(device)
                with watch.part("take"):
                    values = memory[offsets]
                    memory[offsets] = MOMENTUM * values
                    _wait(device)
                count += offsets.numel()
            taken.setdefault(name, []).append(count / sum(wanted))
            return watch.parts

        return case

    def ours(name: str) -> Case:
        residuals = [
            Residual(memory, k, SELECTORS[name] if name in SELECTORS else rivals.of(name), MOMENTUM)
            for memory, k in zip(memories, wanted, strict=True)
        ]

        def case(turn: int) -> dict[str, float]:
            gradients, watch, count = restored(turn), Stopwatch(), 0
            with watch.part("step"):
                for residual, gradient in zip(residuals, gradients, strict=True):
                    count += residual.step(gradient, RATE)
                _wait(device)
            taken.setdefault(name, []).append(count / sum(wanted))
            return watch.parts

        return case

    selected = OURS if device.type == "cpu" else ("warm",)  # the others choose on the host
    cases = {name: plain(name) for name in PLAIN} | {name: ours(name) for name in selected}
    measured = interleave(cases, rounds, warmup=_WARMUP)
    _fill(timing, measured)
    timing.selected = {name: [min(counts[_WARMUP:]), max(counts[_WARMUP:])] for name, counts in taken.items()}
    return timing


def _fill(timing: Timing, measured: Rounds) -> None:
    for name in (name for name in (*PLAIN, *OURS) if name in measured):
        timing.step[name] = Stat.of(measured[name]).plain()
        timing.times[name] = ratio(measured, TOPK, name).plain()
    for name in PLAIN:
        timing.selecting[name] = Stat.of(measured[f"{name}.select"]).plain()
    timing.published = ratio(measured, f"{TOPK}.select", f"{LDTE}.select").plain()


def _laid(moment: Moment, over: str, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return residuals and gradients as they are to be selected from."""
    pairs = list(zip(moment.memories, moment.gradients, strict=True))
    if over == BY_TENSOR:
        pairs = [pair for pair in pairs if pair[0].numel() >= DEFAULT_DENSE_BELOW]
        return [memory.to(device) for memory, _ in pairs], [gradient.to(device) for _, gradient in pairs]
    return tuple([torch.cat([pair[part] for pair in pairs]).to(device)] for part in (0, 1))  # type: ignore[return-value]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
