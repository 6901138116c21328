"""A link and a selecting thread with known costs, and the traces that they would leave."""

from itertools import pairwise

import numpy as np
import torch

from psclient.buckets.bucketing import cuts_of
from psclient.buckets.costs import Costs, Workload, predict
from psclient.buckets.trace import PushTiming, Trace
from pscore.model.layout import ModelLayout, TensorSpec

DENSITY, ENTRY_BYTES = 0.01, 8
COSTS = Costs(lead=1e-3, group=5e-4, tensor=1e-4, element=2e-9, message=2e-3, byte=1e-8, tail=5e-3)


def make_layout(sizes):
    return ModelLayout(tuple(TensorSpec(f"layer{i}", (size,), torch.float32) for i, size in enumerate(sizes)))


def make_workload(sizes, backward=0.1):
    """Backward takes as long for each tensor."""
    elements = np.array(sizes[::-1], dtype=float)
    ready = np.linspace(0, backward, len(sizes))
    return Workload(ready, np.ones(len(sizes)), elements, np.round(DENSITY * elements) * ENTRY_BYTES)


def trace_of(groups, workload, costs, noise=None):
    """A push as it would be with these costs; ``noise`` stretches each duration by a random factor up to 1 + noise."""
    rng = np.random.default_rng(noise[1]) if noise else None
    begin, count = 1000.0, len(workload)
    trace = Trace(groups, opening=begin)
    trace.ready = {count - 1 - place: begin + moment for place, moment in enumerate(workload.ready)}
    timing = PushTiming(len(groups), int(costs.together))
    free, busy, waiting, header_there = begin, 0.0, [], 0.0
    cuts = cuts_of(groups)
    for number, (start, end) in enumerate(pairwise(cuts)):
        select, send = (float(each[0]) for each in workload.group_costs(costs, np.array([start]), end))
        if rng is not None:
            select, send = (each * (1 + rng.uniform(-noise[0], noise[0])) for each in (select, send))
        began = max(free, begin + float(workload.ready[end - 1]))
        if number == 0:
            trace.opening = began
            began += costs.lead
            trace.begun = began
            if not costs.together:
                timing.opened, busy = began, began + costs.message
                header_there = busy
        free = trace.done[number] = began + select
        timing.group_bytes[number] = int(workload.nbytes[start:end].sum())
        waiting.append(number)
        nbytes = sum(timing.group_bytes[each] for each in waiting)
        if nbytes >= costs.together or number == len(groups) - 1:
            if costs.together:
                send = costs.message + costs.byte * nbytes
            busy = max(busy, free) + send
            timing.opened, header_there = timing.opened or free, header_there or busy
            for each in waiting:
                timing.left[each] = free - timing.opened
            timing.arrived += [busy - header_there] * len(waiting)
            waiting = []
        for place in range(start, end):
            trace.entries[count - 1 - place] = int(workload.nbytes[place] / ENTRY_BYTES)
    trace.shards = (({number: number for number in range(len(groups))}, timing),)
    trace.answered = busy + costs.tail
    return trace


def exposed(groups, workload, costs=COSTS):
    return predict(cuts_of(groups), workload, costs).exposed
