"""Who is compared: ``ServerRMSprop`` at 3 % of the bytes, and torch's own ways of training together over gloo."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import psclient

Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
"""Takes its state and a ``GradBucket``, which torch does not export."""

DENSE_STEPS = 10
"""PowerSGD's first steps, whole as in its authors' runs: its approximation starts from gradients of some size."""
LEAST_DENSE_STEPS = 2
"""The fewest that its hook takes: of a group that is formed anew during the training."""
WAIT_FACTOR = 1.5
"""How many times as long as the median worker one may take for a round to wait for it."""
PERIOD = 8
"""Local steps between two averages."""
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
"""Of DiLoCo's Nesterov (Douillard et al., 2023, section 4; the defaults of torchft's example)."""


@dataclass(frozen=True, slots=True)
class Inner:
    """The optimizer that a rival's workers run on the gradient that all of them have.

    Attributes:
        make: takes parameters and the effective rate.
        rate_scale: what the task's rates are multiplied by, as for the methods of this library.
    """

    make: Callable[[Any, float], torch.optim.Optimizer]
    rate_scale: float = 1.0


INNERS = {
    "SGD": Inner(lambda parameters, rate: torch.optim.SGD(parameters, rate)),
    "SGD, momentum 0.9": Inner(lambda parameters, rate: torch.optim.SGD(parameters, 0.1 * rate, 0.9)),
    "RMSprop": Inner(lambda parameters, rate: torch.optim.RMSprop(parameters, rate), 0.01),
    "Adam": Inner(lambda parameters, rate: torch.optim.Adam(parameters, rate, (0.9, 0.99)), 0.01),
}
"""Tried with DDP's whole gradients; the other rivals take the best."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One column of the tables.

    Attributes:
        key: its name in the journal.
        title: its name for readers.
        method: key of :data:`~benchmarks.campaign.methods.METHODS`; empty for a rival.
        rounds: makes the rounds of so many workers; ``None`` trains without.
        overlap: whether the method sends what it has selected while the gradient is computed.
        hook: makes DDP's hook and its state, from the number of first steps that are sent whole; ``None`` for whole
            gradients in fp32; unused where there is a method.
        local: workers step alone, and average their models every :data:`PERIOD` steps.
        outer: what they have moved since is the gradient of an outer Nesterov, as DiLoCo has it.
        tuned_as: the contender whose rate it takes: it has the same trajectory, or nearly.
    """

    key: str
    title: str
    method: str = ""
    rounds: Callable[[int], psclient.Rounds] | None = None
    overlap: bool = False
    hook: Callable[[int], tuple[Any, Hook]] | None = None
    local: bool = False
    outer: bool = False
    tuned_as: str = ""

    def options(self, workers: int) -> dict[str, Any]:
        """Return further keywords of the method's optimizer."""
        return {"rounds": self.rounds(workers) if self.rounds else None, "overlap": self.overlap}


def _rounds_of(quorum: Callable[[int], int]) -> Callable[[int], psclient.Rounds]:
    return lambda workers: psclient.Rounds(quorum=quorum(workers), start_workers=workers)


def _rounds_of_who_is_due(workers: int) -> psclient.Rounds:
    return psclient.Rounds(start_workers=workers, wait_factor=WAIT_FACTOR)


def _power(rank: int) -> Contender:
    def make(dense_steps: int) -> tuple[Any, Hook]:
        return PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=dense_steps), powerSGD_hook

    return Contender(f"power-{rank}", f"PowerSGD, rank {rank}", hook=make)


CONTENDERS = {
    each.key: each
    for each in (
        Contender("rmsprop", "ours, no rounds", "rmsprop"),
        Contender("rounds", "ours, rounds of all", "rmsprop", _rounds_of(lambda workers: workers)),
        Contender("but-one", "ours, rounds of all but one", "rmsprop", _rounds_of(lambda workers: workers - 1)),
        Contender("most", "ours, rounds of 3/4", "rmsprop", _rounds_of(lambda workers: math.ceil(0.75 * workers))),
        Contender("paced", "ours, rounds of who is due", "rmsprop", _rounds_of_who_is_due, tuned_as="rounds"),
        Contender(
            "overlap", "ours, rounds of all, overlap", "rmsprop", _rounds_of(lambda workers: workers), overlap=True
        ),
        Contender("ddp", "DDP"),
        Contender("fp16", "DDP, fp16", hook=lambda _: (None, fp16_compress_hook), tuned_as="ddp"),
        _power(1),
        _power(2),
        _power(4),
        Contender("local", f"local SGD, {PERIOD} steps", local=True),
        Contender("diloco", f"DiLoCo, {PERIOD} steps", local=True, outer=True),
    )
}
"""All contenders by key, those of this library first."""
