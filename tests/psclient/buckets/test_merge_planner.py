"""When plans are made and replaced, and what can be seen of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psclient.buckets import bucketing
from psclient.buckets.layer_density import LayerDensity
from psclient.buckets.planner import BucketPlanner
from psclient.errors import ConfigurationError
from psclient.schedules import lags
from psclient.settings import ClientSettings
from tests.psclient.merge_makers import COSTS, exposed, make_layout, make_workload, trace_of

SIZES = [2_000_000, *[500, 500, 300_000] * 10, 1_000_000]
WORKLOAD = make_workload(SIZES)
LAYOUT = make_layout(SIZES)


LAYERS = bucketing.by_size(SIZES, 0)


def make_planner(rule="pareto", layer_density=None):
    settings = ClientSettings(merge=rule, group_elements=1_000_000, dense_below=4096)
    return BucketPlanner(LAYOUT, settings, layer_density)


def train(planner, steps, costs=COSTS):
    """Return the groups of each step."""
    used = []
    for _ in range(steps):
        used.append(planner.groups)
        planner.learn(trace_of(planner.groups, WORKLOAD, costs))
        planner.advance()
    return used


def best(costs=COSTS):
    return exposed(bucketing.groups_of(bucketing.exact(WORKLOAD, costs)), WORKLOAD, costs)


def test_a_worker_begins_with_groups_by_elements_and_plans_after_a_few_steps():
    planner = make_planner()
    used = train(planner, 12)
    assert used[0] == used[1] == bucketing.by_size(SIZES, 1_000_000)
    assert LAYERS in used
    assert exposed(planner.groups, WORKLOAD) <= 1.03 * best()
    assert planner.plan.rule == "pareto"
    assert planner.plan.planned == 1


def test_greedy_plans_from_the_same_costs():
    planner = make_planner("greedy")
    train(planner, 12)
    assert planner.plan.rule == "greedy"
    assert best() <= exposed(planner.groups, WORKLOAD) <= 2 * best()


@pytest.mark.parametrize("rule", ["layers", "elements", "buckets"])
def test_rules_by_size_never_change_and_are_measured_all_the_same(rule):
    planner = make_planner(rule)
    assert len(set(train(planner, 30))) == 1
    assert planner.plan.measured_exposed == pytest.approx(planner.plan.predicted_exposed, rel=0.15)


def test_it_plans_anew_when_costs_have_drifted():
    planner = make_planner()
    train(planner, 30)
    before, groups = planner.plan.planned, planner.groups
    slow = replace(COSTS, message=20e-3)
    train(planner, 60, slow)
    assert planner.plan.planned > before
    assert exposed(planner.groups, WORKLOAD, slow) <= 1.3 * best(slow)
    assert exposed(planner.groups, WORKLOAD, slow) < 0.7 * exposed(groups, WORKLOAD, slow)


def test_it_does_not_while_they_have_not():
    planner = make_planner()
    train(planner, 60)
    assert planner.plan.planned == 1


def test_after_some_hundred_steps_it_looks_again(monkeypatch):
    monkeypatch.setattr("psclient.buckets.planner._PERIOD_STEPS", 50)
    planner = make_planner()
    used = train(planner, 70)
    assert planner.plan.planned == 2
    assert LAYERS in used[50:]
    assert len(set(used[-10:])) == 1


def test_a_push_that_shows_nothing_is_left_out():
    planner = make_planner("layers")
    trace = trace_of(planner.groups, WORKLOAD, COSTS)
    trace.shards[0][1].arrived.clear()  # as after a repetition
    for _ in range(5):
        planner.learn(trace)
    assert planner.plan.costs is None


def test_the_plan_is_a_table_of_predicted_and_measured_times():
    planner = make_planner()
    assert "– ms predicted, – ms measured" in str(planner.plan)
    train(planner, 30)
    plan = planner.plan
    lines = str(plan).splitlines()
    assert len(lines) == 3 + len(plan.groups)
    assert f"{plan.predicted_exposed * 1e3:.2f} ms predicted, {plan.measured_exposed * 1e3:.2f} ms measured" in lines[0]
    assert lines[3].startswith(plan.groups[0].names[-1])
    assert f"{plan.groups[-1].measured.arrived * 1e3:.2f}" in lines[-1]
    assert sum(group.elements for group in plan.groups) == sum(SIZES)
    for group in plan.groups:
        assert group.predicted == pytest.approx(group.measured, rel=0.1, abs=2e-3)
        assert group.measured.ready <= group.measured.selected <= group.measured.arrived


def test_adopted_groups_are_used_from_the_next_step_on_and_stay():
    planner = make_planner("buckets")
    planner.adopt(LAYERS, "layers")
    planner.advance()
    assert set(train(planner, 70)) == {LAYERS}
    assert planner.plan.rule == "layers"


# LAGS

numbers = st.floats(0, 10, allow_nan=False)


@given(
    st.lists(st.tuples(numbers, st.integers(0, 10**8)), max_size=20),
    st.floats(0, 0.1),
    st.floats(0, 1e-6),
)
def test_lags_densities_are_in_range_and_rise_with_the_time_that_is_left(layers, message, byte):
    chosen = LayerDensity(0.002, 0.2)
    found = chosen.densities([slack for slack, _ in layers], [size for _, size in layers], message, byte)
    assert all(0.002 <= density <= 0.2 for density in found)
    more = chosen.densities([slack + 0.1 for slack, _ in layers], [size for _, size in layers], message, byte)
    assert all(after >= before for before, after in zip(found, more, strict=True))


def test_lags_densities_are_those_of_the_formula():
    found = lags(0.001, 0.5).densities([0.05, 0.0, 1.0], [1e6, 1e6, 1e3], message=0.01, byte=1e-7)
    assert found == pytest.approx([0.05, 0.001, 0.5])


def test_lags_gives_layers_densities_of_their_own_once_costs_are_measured():
    planner = make_planner("layers", lags(0.001, 0.3))
    assert planner.densities == {}
    train(planner, 12)
    first, last = planner.densities[0], planner.densities[len(SIZES) - 1]
    assert first == 0.001  # nothing of backward is left when the first tensor's gradient comes, at the end
    assert last > 0.05


@pytest.mark.parametrize("bad", [{"lowest": 0}, {"highest": 2}, {"lowest": 0.2}, {"start": 0.5}])
def test_lags_refuses_densities_that_are_none(bad):
    with pytest.raises(ConfigurationError, match="lags needs"):
        lags(**bad)


def test_lags_says_where_it_means_nothing():
    with pytest.raises(ConfigurationError, match="overlap=True"):
        lags().check(overlap=False, select_over="tensor")
    with pytest.raises(ConfigurationError, match="select_over"):
        lags().check(overlap=True, select_over="group")


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="pareto"):
        ClientSettings(merge="best")
