"""When to plan: after a few measured steps, again when costs have drifted, and now and then in any case."""

import logging
import threading
import time
from collections import deque
from statistics import median

import numpy as np

from psclient.buckets import bucketing
from psclient.buckets.bucketing import Groups
from psclient.buckets.costs import Prediction, Timeline, predict
from psclient.buckets.layer_density import LayerDensity
from psclient.buckets.meter import CostMeter
from psclient.buckets.plan import BucketPlan, PlannedGroup
from psclient.buckets.trace import Trace
from psclient.settings import ClientSettings
from pscore.model.layout import ModelLayout
from pscore.selection import entries_for

log = logging.getLogger("psclient")

_COLD_STEPS = 2  # the first steps compile kernels and have no thresholds: they show nothing
_PROBES = ("layers", "elements") * 3
_PERIOD_STEPS = 500
_CHECK_STEPS = 10
_DRIFT, _DRIFT_SECONDS = 0.2, 1e-3
_WORTH_CHANGING = 1.02
_REMEMBERED = 31
_MOST_PARTS = 512  # tensors that a plan is made of; of more, small neighbours count as one


class BucketPlanner:
    """Decides which tensors travel together, and measures the outcome. :meth:`learn` may run in another thread.

    Rules by size are fixed. The rules that plan begin with groups of ``group_elements``; the first steps, and two now
    and then, push with groups of very different sizes, since a cost that never varies cannot be told from the others;
    then the plan is made.

    Attributes:
        groups: positions of each group's tensors, in the order of sending; changed by :meth:`advance` only.
        densities: of single tensors, by position; empty without ``layer_density`` and before costs are known.
    """

    def __init__(
        self, layout: ModelLayout, settings: ClientSettings, layer_density: LayerDensity | None = None
    ) -> None:
        self._layout, self._settings, self._layer_density = layout, settings, layer_density
        self._sizes = [spec.numel for spec in layout.parameters]
        self._by_size = {
            "layers": bucketing.by_size(self._sizes, 0),
            "elements": bucketing.by_size(self._sizes, settings.group_elements),
            "buckets": bucketing.by_size([spec.nbytes for spec in layout.parameters], settings.bucket_bytes),
        }
        self._adapts = settings.merge not in self._by_size or layer_density is not None
        self._rule: str = settings.merge if settings.merge in self._by_size else "elements"
        self._chosen = self.groups = self._by_size[self._rule]
        self.densities: dict[int, float] = {}
        self._lock = threading.RLock()
        self._meter = CostMeter(np.array(self._sizes, dtype=np.float64))
        self._due = self._adapts  # a plan, once the probes are measured
        self._probes = deque([self._rule] * (_COLD_STEPS - 1) + list(_PROBES) if self._adapts else [])
        self._age = -_COLD_STEPS  # measured steps since groups were chosen
        self._planned = 0
        self._expected = self._planning_seconds = 0.0
        self._measured: deque[tuple[list[Timeline], float]] = deque(maxlen=_REMEMBERED)

    @property
    def plan(self) -> BucketPlan:
        """The plan of now, with predicted and measured times."""
        with self._lock:
            predicted = self._predict(self._chosen) if self._meter.traces else None
            measured = np.median([timelines for timelines, _ in self._measured], axis=0) if self._measured else None
            groups = tuple(
                PlannedGroup(
                    tuple(spec.name for spec in self._layout.parameters[group.start : group.stop]),
                    sum(self._sizes[group.start : group.stop]),
                    None if predicted is None else predicted.groups[number],
                    None if measured is None else Timeline(*measured[number].tolist()),
                )
                for number, group in enumerate(self._chosen)
            )
            return BucketPlan(
                rule=self._rule,
                groups=groups,
                predicted_exposed=None if predicted is None else predicted.exposed,
                measured_exposed=median(seconds for _, seconds in self._measured) if self._measured else None,
                steps=len(self._measured),
                costs=self._meter.costs if self._meter.traces else None,
                planned=self._planned,
                planning_seconds=self._planning_seconds,
            )

    def advance(self) -> None:
        """Move on to the groups of the next step; call between two pushes."""
        self.groups = self._by_size[self._probes.popleft()] if self._probes else self._chosen

    def learn(self, trace: Trace) -> None:
        """Learn from a push that was answered; plan where it is time for it."""
        with self._lock:
            if not trace.complete:
                return
            self._age += 1
            is_check = self._age % _CHECK_STEPS == 0
            # Rules by size need no costs: a tenth of the steps is enough to show.
            if self._age <= 0 or not (self._adapts or is_check or self._meter.traces < _CHECK_STEPS):
                return
            self._meter.learn(trace)
            if tuple(trace.groups) == self._chosen:
                self._measured.append((trace.timelines(self._meter.costs), trace.answered - trace.last_gradient))
            if self._due:
                if not self._probes and self._meter.traces >= len(_PROBES):
                    self._choose()
            elif self._adapts and self._age >= _PERIOD_STEPS:
                self._probes.extend(_PROBES[:2])
                self._due = True
            elif self._adapts and is_check:
                change = abs(self._predict(self._chosen).exposed - self._expected)
                if change > max(_DRIFT * self._expected, _DRIFT_SECONDS):
                    self._choose()

    def groups_by(self, rule: str) -> Groups:
        """Return the groups that a rule makes of the costs that are known now."""
        if rule in self._by_size:
            return self._by_size[rule]
        workload, make = self._meter.workload, bucketing.exact if rule == "pareto" else bucketing.greedy
        parts = bucketing.parts(workload.elements, _MOST_PARTS)
        return bucketing.groups_of([parts[place] for place in make(workload.joined(parts), self._meter.costs)])

    def adopt(self, groups: Groups, rule: str) -> None:
        """Push with these groups from the next :meth:`advance` on."""
        with self._lock:
            if groups != self._chosen:
                self._measured.clear()
            self._chosen, self._rule, self._age = groups, rule, 0
            self._expected = self._predict(groups).exposed

    def _choose(self) -> None:
        """Plan from the costs that are known now; keep the plan of now where another gains next to nothing."""
        started = time.perf_counter()
        if self._layer_density is not None:
            self._set_densities(self._layer_density)
        groups = self.groups_by(self._settings.merge)
        if self._planned and self._predict(self._chosen).exposed <= _WORTH_CHANGING * self._predict(groups).exposed:
            groups = self._chosen
        self.adopt(groups, self._settings.merge)
        self._planning_seconds = time.perf_counter() - started
        self._due = False
        self._planned += 1
        log.debug("planned anew in %.1f ms: %s", self._planning_seconds * 1e3, self.plan)

    def _predict(self, groups: Groups) -> Prediction:
        return predict(bucketing.cuts_of(groups), self._meter.workload, self._meter.costs)

    def _set_densities(self, layer_density: LayerDensity) -> None:
        costs, slack = self._meter.costs, self._meter.backward_left.tolist()
        found = layer_density.densities(slack, self._sizes, costs.message, costs.byte, self._meter.entry_bytes)
        self.densities = dict(enumerate(found))
        dense_below = self._layout.whole_below(self._settings.dense_below)
        self._meter.expect(
            {
                position: entries_for(size, found[position])
                for position, size in enumerate(self._sizes)
                if size >= dense_below
            }
        )
