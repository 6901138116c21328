"""The merge of the MGS-SGD paper, from costs that are known and from pushes that show them; densities by layer."""

from itertools import pairwise

import pytest
import torch

from psclient.compress.selector import Grouping, by_size
from psclient.engine.mgs import Costs, LayerDensity, MergedGradients, merge
from psclient.errors import ConfigurationError
from pscore.model.layout import ModelLayout, TensorSpec

SIZES = [1000, 200_000, 50, 400_000, 3000, 90_000]
COSTS = Costs(group=5e-4, element=2e-9, message=2e-3, byte=1e-8)
ENTRY_BYTES = 8


def exposed(ends, ready, elements, nbytes, costs):
    """When the last group is there, of groups that are selected and sent one after the other."""
    selected = arrived = 0.0
    for start, end in pairwise([0, *ends]):
        selected = max(selected, ready[end - 1]) + costs.group + costs.element * sum(elements[start:end])
        arrived = max(arrived, selected) + costs.message + costs.byte * sum(nbytes[start:end])
    return arrived


def workload(sizes, backward):
    elements = sizes[::-1]
    ready = [backward * (n + 1) / len(sizes) for n in range(len(sizes))]
    return ready, elements, [ENTRY_BYTES * max(1, size // 100) for size in elements]


def test_tensors_travel_apart_if_a_start_up_costs_nothing_and_together_if_it_costs_all():
    ready, elements, nbytes = workload(SIZES, 0.1)
    apart = merge(ready, elements, nbytes, Costs(0.0, 2e-9, 0.0, 1e-8))
    assert apart == [1, 2, 3, 4, 5, 6]
    assert merge(ready, elements, nbytes, Costs(0.0, 2e-9, 10.0, 1e-8)) == [6]
    assert merge(ready[:1], elements[:1], nbytes[:1], COSTS) == [1]


@pytest.mark.parametrize("backward", [0.0, 0.003, 0.02, 0.2])
@pytest.mark.parametrize("startup", [1e-4, 2e-3, 2e-2])
def test_merged_tensors_are_there_hardly_later_than_tensors_apart_or_all_at_once(backward, startup):
    costs = COSTS._replace(message=startup)
    ready, elements, nbytes = workload(SIZES, backward)
    merged = exposed(merge(ready, elements, nbytes, costs), ready, elements, nbytes, costs)
    for ends in ([1, 2, 3, 4, 5, 6], [6]):
        assert merged <= 1.15 * exposed(ends, ready, elements, nbytes, costs)  # one pass is not always the best


def pushed(merged, grouping, clock, costs, backward):
    """One push as it would be with these costs."""
    begun = clock[0]
    merged.opened()
    count = len(SIZES)
    merged.note_gradients({n: begun + backward * (count - n) / count for n in range(count)})
    free, header, link = begun, begun + costs.message, begun + costs.message
    sizes, arrivals = [], []
    for number, group in enumerate(grouping.groups):
        ready = begun + backward * (count - group.start) / count
        free = max(free, ready) + costs.group + costs.element * sum(SIZES[group.start : group.stop])
        clock[0] = free
        entries = {n: max(1, SIZES[n] // 100) for n in group}
        merged.sent(number, entries)
        sizes.append(ENTRY_BYTES * sum(entries.values()))
        link = max(link, free) + costs.message + costs.byte * sizes[-1]
        arrivals.append(link - header)
    clock[0] = max(free, link)
    merged.answered([({number: number for number in range(len(sizes))}, sizes, arrivals)])
    merged.advance()


@pytest.mark.parametrize(("message", "at_most"), [(1e-6, 6), (0.05, 1)])
def test_groups_follow_the_costs_that_pushes_have_shown(monkeypatch, message, at_most):
    clock = [100.0]
    monkeypatch.setattr("psclient.engine.mgs.time.perf_counter", lambda: clock[0])
    layout = ModelLayout(tuple(TensorSpec(f"layer{n}", (size,), torch.float32) for n, size in enumerate(SIZES)))
    grouping = Grouping(layout, 1 << 20)
    before = grouping.groups
    merged = MergedGradients(layout, grouping, None, merges=True)
    seen = []
    for _ in range(12):
        seen.append(grouping.groups)
        pushed(merged, grouping, clock, COSTS._replace(message=message), 0.01)
    assert {before, by_size(SIZES, 0)} <= set(seen), "groups of very different sizes are measured"
    assert len(grouping.groups) <= at_most
    assert [n for group in reversed(grouping.groups) for n in group] == list(range(len(SIZES)))
    assert seen[-1] == grouping.groups, "they stay"
    if at_most == 1:
        assert grouping.groups == (range(6),)


def test_a_layer_sends_what_hides_behind_the_backward_time_that_is_ahead():
    costs = Costs(0.0, 0.0, message=0.01, byte=1e-6)
    found = LayerDensity(0.001, 0.5, 0.1).densities([0.0, 0.02, 1.0], [1000.0, 10_000.0, 1000.0], costs)
    assert found == pytest.approx([0.001, 0.125, 0.5])
    with pytest.raises(ConfigurationError, match="lowest"):
        LayerDensity(0.5, 0.1, 0.2)
