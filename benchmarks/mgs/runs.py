"""Runs of one model with every plan in turn, step by step, against a real server behind a slow link."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import psclient
from benchmarks.mgs.backward import SleepingBackward
from benchmarks.mgs.models import PaperModel
from benchmarks.mgs.quiet import QuietGate
from benchmarks.mgs.slowlink import slow_link
from benchmarks.workload.synthetic import Noise, SyntheticModel
from psclient.buckets.costs import Costs
from psclient.settings import ClientSettings

RULES = ("layers", "buckets", "greedy", "pareto")
_WARM_STEPS = 12  # cold steps, probes, and the plan
_SETTLING_ROUNDS = 1


class Link(NamedTuple):
    """A link.

    Attributes:
        startup: seconds a message.
        rate: bytes a second; 0 for no limit.
    """

    startup: float
    rate: float


@dataclass
class Outcome:
    """What became of one rule.

    Attributes:
        groups: of its plan in the last round; the two rules that plan do so before each round.
        exposed: measured seconds from the last gradient to the answer, step by step.
        predicted: the same, as predicted before each step.
    """

    groups: int = 0
    exposed: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)

    @property
    def error(self) -> float:
        """Predicted over measured, of medians, less 1."""
        return median(self.predicted) / median(self.exposed) - 1


@dataclass
class Run:
    """All rules of one model on one link.

    Attributes:
        model: what was pushed.
        link: which way.
        backward: seconds.
        outcomes: by rule.
        costs: as measured at the end.
        planning: seconds that the exact plan took to make.
        noisy: share of the steps before which the machine did not come to rest.
    """

    model: PaperModel
    link: Link
    backward: float
    outcomes: dict[str, Outcome]
    costs: Costs
    planning: float
    noisy: float


def compare(
    model: PaperModel,
    link: Link,
    backward: float,
    density: float,
    rounds: int,
    seed: int,
    say: Callable[[str], None],
    has_time: Callable[[], bool] = lambda: True,
) -> Run:
    """Let every rule push in turn, one step each, again and again.

    Args:
        model: what is pushed.
        link: which way.
        backward: seconds of a backward pass.
        density: of a push.
        rounds: that count.
        seed: of the gradients.
        say: shows what is going on.
        has_time: where it says no, the rounds so far are enough; three are always made.
    """
    gate = QuietGate()
    synthetic = SyntheticModel(model.layout)
    compute = SleepingBackward(synthetic, Noise(model.layout, seed), model.work, backward)
    say(f"{model.name}: start the server, upload")
    with psclient.LocalServer(buffers="none", down_mode="exact") as server, slow_link(server.server, *link) as address:
        settings = ClientSettings(server=address, worker="mgs", deadline_seconds=120, merge="pareto")
        with psclient.DGS(
            synthetic.parameters(), 0.01, 0.3, density=density, model=synthetic, overlap=True, settings=settings
        ) as optimizer:
            for step in range(_WARM_STEPS):
                say(f"{model.name}: measure costs, step {step + 1} of {_WARM_STEPS}")
                gate.wait()
                compute.run()
                optimizer.step()
            optimizer.pull()
            planning = optimizer.plan.planning_seconds
            planner = optimizer._worker.planner
            outcomes = {rule: Outcome() for rule in RULES}
            for turn in range(_SETTLING_ROUNDS + rounds):
                if turn >= _SETTLING_ROUNDS + 3 and not has_time():
                    break
                say(f"{model.name}: round {turn + 1} of {_SETTLING_ROUNDS + rounds}")
                for rule in _turned(RULES, turn):
                    groups = planner.groups_by(rule)
                    outcomes[rule].groups = len(groups)
                    planner.adopt(groups, rule)
                    planner.advance()
                    predicted = optimizer.plan.predicted_exposed
                    gate.wait()
                    compute.run()
                    optimizer.step()
                    optimizer.pull()  # so that nothing of it goes on beside the next
                    measured = optimizer.plan.measured_exposed
                    assert predicted is not None
                    assert measured is not None
                    if turn >= _SETTLING_ROUNDS:
                        outcomes[rule].exposed.append(measured)
                        outcomes[rule].predicted.append(predicted)
            costs = optimizer.plan.costs
            assert costs is not None
            return Run(model, link, backward, outcomes, costs, planning, gate.noisy)


def _turned(rules: Sequence[str], turn: int) -> Sequence[str]:
    shift = turn % len(rules)
    return [*rules[shift:], *rules[:shift]]
