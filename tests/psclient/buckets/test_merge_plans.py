"""Plans: the exact one is the best of all, the others are what they are called."""

from dataclasses import astuple
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psclient.buckets import bucketing
from psclient.buckets.costs import Costs, Workload, predict
from tests.psclient.merge_makers import COSTS, make_workload
from tests.psclient.published_costs import OneStreamCosts, PublishedCosts, sent_bytes

seconds = st.sampled_from([0.0, 1e-4, 1e-3, 5e-3]) | st.floats(0, 0.02)
tensors = st.tuples(st.sampled_from([0.0, 1e-3, 2e-3]) | st.floats(0, 0.02), st.integers(0, 5_000_000))


@st.composite
def workloads(draw, most=7):
    rows = draw(st.lists(tensors, min_size=1, max_size=most))
    backward, sizes = (np.array(each, dtype=float) for each in zip(*rows, strict=True))
    return Workload(np.cumsum(backward), (sizes > 0).astype(float), sizes, 0.08 * sizes)


@st.composite
def costs(draw):
    group, message, lead = (draw(seconds) for _ in range(3))
    element, byte = draw(st.floats(0, 1e-8)), draw(st.floats(0, 1e-7))
    kind = draw(st.sampled_from([Costs, OneStreamCosts]))
    return kind(lead, group, draw(st.floats(0, 1e-3)), element, message, byte, tail=3e-3)


class PublishedBesideBackward(PublishedCosts):
    """The paper's costs, with a selection that backward does not wait for."""

    begin = Costs.begin


def every_plan(count):
    for size in range(count):
        for inner in combinations(range(1, count), size):
            yield (0, *inner, count)


@given(workloads(), costs())
@settings(deadline=None, max_examples=100)
def test_the_exact_plan_is_the_best_of_all(workload, costs):
    found = predict(bucketing.exact(workload, costs), workload, costs)
    best = min(predict(cuts, workload, costs).exposed for cuts in every_plan(len(workload)))
    assert found.exposed == pytest.approx(best, abs=1e-12)


@given(workloads(), st.sampled_from([2, 4, 8, 16]), st.sampled_from([PublishedCosts, PublishedBesideBackward]))
@settings(deadline=None, max_examples=40)
def test_it_is_the_best_under_costs_that_are_no_straight_lines_too(workload, workers, kind):
    costs = kind(workers=workers)
    found = predict(bucketing.exact(workload, costs), workload, costs)
    best = min(predict(cuts, workload, costs).exposed for cuts in every_plan(len(workload)))
    assert found.exposed == pytest.approx(best, abs=1e-12)


@given(workloads(most=40), costs())
@settings(deadline=None, max_examples=60)
def test_no_other_rule_beats_the_exact_plan(workload, costs):
    best = predict(bucketing.exact(workload, costs), workload, costs).exposed
    others = [bucketing.greedy(workload, costs), tuple(range(len(workload) + 1)), (0, len(workload))]
    for cuts in others:
        assert predict(cuts, workload, costs).exposed >= best - 1e-12


def test_greedy_merges_where_start_up_outweighs_waiting_and_not_where_it_does_not():
    workload = make_workload([1000] * 20, backward=0.01)
    dear = Costs(0, 0, 0, 0, message=10e-3, byte=0, tail=0)
    cheap = Costs(0, 0, 0, 0, message=1e-6, byte=0, tail=0)
    assert len(bucketing.greedy(workload, dear)) - 1 <= 3
    assert len(bucketing.greedy(workload, cheap)) - 1 == 20


def test_greedy_leaves_something_under_the_papers_own_costs():
    """ResNet-like: many small tensors between large ones, selection on the stream of backward."""
    elements = np.array([2_000_000, *[2_000, 500_000] * 30, 9_000], dtype=float)
    ready = np.linspace(0.002, 0.12, elements.size)
    workload = Workload(ready, np.ones_like(ready), elements, sent_bytes(elements, 0.001))
    costs = PublishedCosts(workers=4)
    greedy, exact = (
        predict(rule(workload, costs), workload, costs).exposed + 0.12 for rule in (bucketing.greedy, bucketing.exact)
    )
    assert 1.01 < greedy / exact < 1.3


def test_a_group_that_sends_nothing_costs_no_message():
    assert COSTS.send(np.array([0.0, 1.0])).tolist() == pytest.approx([0.0, COSTS.message + COSTS.byte])


def test_groups_by_size_begin_with_the_last_tensor_and_cover_everything():
    assert bucketing.by_size([5, 1, 1, 9, 1], 4) == (range(3, 5), range(0, 3))
    assert bucketing.by_size([3], 100) == (range(0, 1),)
    assert bucketing.by_size([7, 0], 0) == (range(1, 2), range(0, 1))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=50), st.integers(1, 3000))
def test_cuts_and_groups_say_the_same(sizes, least):
    groups = bucketing.by_size(sizes, least)
    assert bucketing.groups_of(bucketing.cuts_of(groups)) == groups
    assert [position for group in reversed(groups) for position in group] == list(range(len(sizes)))
    assert all(sum(sizes[group.start : group.stop]) >= least for group in groups[:-1])


def test_a_model_of_very_many_tensors_is_planned_in_fewer_parts():
    workload = make_workload([100 + i % 7 for i in range(3000)])
    cuts = bucketing.parts(workload.elements, 512)
    joined = workload.joined(cuts)
    assert 256 <= len(joined) <= 512
    assert (cuts[0], cuts[-1]) == (0, 3000)
    assert joined.elements.sum() == workload.elements.sum()
    assert joined.ready[-1] == workload.ready[-1]
    same = workload.joined(bucketing.parts(workload.elements, 3000))
    assert all((each == before).all() for each, before in zip(vars(same).values(), astuple(workload), strict=True))
