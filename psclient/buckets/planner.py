"""When to plan: after a few measured steps, again when costs have drifted, and now and then in any case."""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Literal

import numpy as np

from psclient.buckets import bucketing
from psclient.buckets.bucketing import Groups
from psclient.buckets.costs import Cuts, Timeline, predict
from psclient.buckets.lags import Lags
from psclient.buckets.meter import CostMeter
from psclient.buckets.plan import BucketPlan, PlannedGroup
from psclient.buckets.trace import Trace
from pscore.model.layout import ModelLayout
from pscore.select import entries_for

log = logging.getLogger("psclient")

Rule = Literal["pareto", "greedy", "buckets", "layers", "elements"]

_COLD_STEPS = 2  # the first steps compile kernels and have no thresholds: they show nothing
_PROBES = ("layers", "elements") * 3
_PERIOD_STEPS = 500
_CHECK_STEPS = 10
_DRIFT, _DRIFT_SECONDS = 0.2, 1e-3
_WORTH_CHANGING = 1.02
_REMEMBERED = 31
_MOST_PARTS = 512  # tensors that a plan is made of; of more, small neighbours count as one


class BucketPlanner:
    """Decides which tensors travel together, and measures what came of it. :meth:`learn` may run in another thread.

    Rules by size are fixed. The rules that plan begin with groups of ``group_elements``; the first steps, and two now
    and then, push with groups of very different sizes, since a cost that never varies cannot be told from the others;
    then the plan is made.

    Args:
        layout: the model.
        rule: ``pareto`` (exact) and ``greedy`` plan from measured costs; the others are rules by size.
        group_elements: the least size of a group of ``elements``, in elements.
        bucket_bytes: the least size of a group of ``buckets``, in bytes of gradients.
        dense_below: tensors with fewer elements are sent whole.
        lags: gives each layer a density of its own, where asked for.

    Attributes:
        groups: positions of each group's tensors, in the order of sending; changed by :meth:`advance` only.
        densities: of single tensors, by position; empty without ``lags`` and before costs are known.
    """

    def __init__(
        self,
        layout: ModelLayout,
        rule: Rule,
        *,
        group_elements: int,
        bucket_bytes: int,
        dense_below: int = 0,
        lags: Lags | None = None,
    ) -> None:
        self._layout, self._rule, self._lags, self._dense_below = layout, rule, lags, dense_below
        self._sizes = [spec.numel for spec in layout.parameters]
        self._fixed: dict[str, Groups] = {
            "layers": bucketing.layers(len(self._sizes)),
            "elements": bucketing.by_size(self._sizes, group_elements),
            "buckets": bucketing.by_size([spec.nbytes for spec in layout.parameters], bucket_bytes),
        }
        self._meter = CostMeter(np.array(self._sizes, dtype=np.float64))
        self._lock = threading.Lock()
        self._cold = _COLD_STEPS
        self._shown: str = rule if rule in self._fixed else "elements"
        self._chosen = self.groups = self._fixed[self._shown]
        self.densities: Mapping[int, float] = {}
        self._plans = self._adapts = rule not in self._fixed or lags is not None
        self._due = self._adapts  # a plan, once the probes are measured
        self._probes = deque([self._shown] * (_COLD_STEPS - 1) + list(_PROBES) if self._adapts else [])
        self._age = self._planned = 0
        self._expected = self._planning_seconds = 0.0
        self._seen: deque[tuple[list[Timeline], float]] = deque(maxlen=_REMEMBERED)

    @property
    def plan(self) -> BucketPlan:
        """The plan of now, with what is predicted of it and what was measured."""
        with self._lock:
            return self._describe()

    def density_of(self, position: int) -> float | None:
        """Return the density of its own that a tensor has; ``None`` for that of its param group."""
        return self.densities.get(position)

    def advance(self) -> None:
        """Move on to the groups of the next step; call between two pushes."""
        self.groups = self._fixed[self._probes.popleft()] if self._probes else self._chosen

    def learn(self, trace: Trace) -> None:
        """Learn from a push that was answered; plan where it is time for it."""
        with self._lock:
            if not trace.complete:
                return
            if self._cold:
                self._cold -= 1
                return
            self._age += 1
            if not self._plans and self._meter.traces >= _CHECK_STEPS and self._age % _CHECK_STEPS:
                return  # rules by size need no costs: a tenth of the steps is enough to show
            self._meter.learn(trace)
            if tuple(trace.groups) == self._chosen:
                self._seen.append(self._measured(trace))
            if self._due and not self._probes and self._meter.traces >= len(_PROBES):
                self._choose()
            elif self._adapts and not self._due:
                if self._age >= _PERIOD_STEPS:
                    self._probes.extend(_PROBES[:2])
                    self._due = True
                elif self._age % _CHECK_STEPS == 0 and self._has_drifted():
                    self._choose()

    def cuts(self, rule: str) -> Cuts:
        """Return the groups that a rule makes of the costs that are known now, in backward order."""
        if rule in self._fixed:
            return bucketing.cuts_of(self._fixed[rule])
        whole, costs = self._meter.workload, self._meter.costs
        parts = bucketing.parts(whole.elements, _MOST_PARTS)
        cut = (bucketing.exact if rule == "pareto" else bucketing.greedy)(whole.joined(parts), costs)
        return tuple(parts[place] for place in cut)

    def fix(self, groups: Groups, rule: str) -> None:
        """Stay with these groups from the next step on: for comparing plans."""
        with self._lock:
            self._probes.clear()
            self._due = self._adapts = False
            self._seen.clear()
            self._choose_groups(groups, rule)

    def _choose(self) -> None:
        """Plan from the costs that are known now; keep the plan of now where another gains next to nothing."""
        started = time.perf_counter()
        if self._lags is not None:
            self._set_densities(self._lags)
        groups = bucketing.groups_of(self.cuts(self._rule))
        if self._planned and self._exposed(self._chosen) <= _WORTH_CHANGING * self._exposed(groups):
            groups = self._chosen
        self._choose_groups(groups, self._rule)
        self._planning_seconds = time.perf_counter() - started
        self._due = False
        self._planned += 1
        log.debug("planned anew in %.1f ms: %s", self._planning_seconds * 1e3, self._describe())

    def _choose_groups(self, groups: Groups, rule: str) -> None:
        if groups != self._chosen:
            self._seen.clear()
        self._chosen, self._shown, self._age = groups, rule, 0
        self._expected = self._exposed(groups)

    def _exposed(self, groups: Groups) -> float:
        return predict(bucketing.cuts_of(groups), self._meter.workload, self._meter.costs).exposed

    def _has_drifted(self) -> bool:
        change = abs(self._exposed(self._chosen) - self._expected)
        return change > max(_DRIFT * self._expected, _DRIFT_SECONDS)

    def _set_densities(self, lags: Lags) -> None:
        costs, slack = self._meter.costs, self._meter.backward_left.tolist()
        found = lags.densities(slack, self._sizes, costs.message, costs.byte, self._meter.entry_bytes)
        self.densities = dict(enumerate(found))
        sparse = [position for position, size in enumerate(self._sizes) if size >= self._dense_below]
        self._meter.expect({position: entries_for(self._sizes[position], found[position]) for position in sparse})

    def _measured(self, trace: Trace) -> tuple[list[Timeline], float]:
        """Return a push's moments by group, after its first gradient, and what was exposed of it."""
        header = self._meter.costs.message
        arrived = [0.0] * len(trace.groups)
        for places, timing in trace.shards:
            for number, place in places.items():
                if timing.left[place] >= 0:
                    arrived[number] = max(arrived[number], timing.opened + header + timing.arrived[place])
        moments = []
        for number, last in enumerate(arrived):
            found = trace.group_ready(number), trace.done[number], max(last, trace.done[number])
            moments.append(Timeline(*(max(0.0, moment - trace.first_gradient) for moment in found)))
        return moments, trace.answered - trace.last_gradient

    def _describe(self) -> BucketPlan:
        costs = self._meter.costs if self._meter.traces else None
        foreseen = predict(bucketing.cuts_of(self._chosen), self._meter.workload, costs) if costs is not None else None
        measured = [
            Timeline(*(median(each) for each in zip(*moments, strict=True)))
            for moments in zip(*(seen for seen, _ in self._seen), strict=True)
        ]
        groups = tuple(
            PlannedGroup(
                tuple(spec.name for spec in self._layout.parameters[group.start : group.stop]),
                sum(self._sizes[group.start : group.stop]),
                None if foreseen is None else foreseen.groups[number],
                measured[number] if measured else None,
            )
            for number, group in enumerate(self._chosen)
        )
        exposed = [seconds for _, seconds in self._seen]
        return BucketPlan(
            rule=self._shown,
            groups=groups,
            predicted_exposed=None if foreseen is None else foreseen.exposed,
            measured_exposed=median(exposed) if exposed else None,
            steps=len(exposed),
            costs=costs,
            planned=self._planned,
            planning_seconds=self._planning_seconds,
        )
