"""The benchmark keeps its time: two minutes quick, half an hour in full."""

import time
from dataclasses import replace

from benchmarks import pairs
from benchmarks.bench import BUDGETS, SECTIONS
from benchmarks.harness.section import Plan
from benchmarks.harness.timing import interleave
from benchmarks.workload.layouts import one_tensor


def test_every_section_has_a_budget_and_together_they_fit():
    assert list(BUDGETS) == list(SECTIONS)
    together = [seconds for key, seconds in BUDGETS.items() if key != pairs.KEY]
    assert sum(quick for quick, _ in together) <= 120
    assert sum(full for _, full in together) <= 1800


def test_a_plan_knows_what_time_is_left():
    plan = Plan(True, one_tensor(10), "", 0.01, 3, 3, 0, print)
    assert plan.has_time(1e9)
    plan = replace(plan, deadline=time.monotonic() + 10)
    assert plan.has_time(5)
    assert not plan.has_time(15)


def test_repetition_ends_with_the_time_after_one_round_that_counts():
    assert interleave({"a": lambda turn: None}, 10, warmup=2, has_time=lambda: False).keys() == {"a"}
    assert len(interleave({"a": lambda turn: None}, 10, warmup=2, has_time=lambda: False)["a"]) == 1
    assert len(interleave({"a": lambda turn: None}, 10, warmup=2)["a"]) == 10
