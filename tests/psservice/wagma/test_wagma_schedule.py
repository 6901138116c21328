"""Who averages with whom: groups mix completely, keep the mean, and are the same at every shard."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.wire.errors import ErrorCode, Rejected
from psservice.model.training_mode import GroupSettings
from psservice.wagma.schedule import StepTimes, cut, default_size, groups_of
from tests.tiers import examples


def names(count):
    return [f"w{rank:03d}" for rank in range(count)]


def averaged(models, groups):
    """Every member of a group gets the group's mean."""
    return {worker: sum(models[other] for other in group) / len(group) for group in groups for worker in group}


@pytest.mark.parametrize(("size", "digits"), [(2, 1), (2, 2), (2, 4), (3, 3), (4, 2), (8, 2)])
@given(first=st.integers(0, 50), seed=st.integers(0, 2**16))
@settings(deadline=None, max_examples=examples(10))
def test_without_updates_as_many_rounds_as_digits_reach_the_consensus(size, digits, first, seed):
    workers = names(size**digits)
    models = {worker: math.sin(seed + 7 * rank) for rank, worker in enumerate(workers)}
    mean = sum(models.values()) / len(models)
    for iteration in range(first, first + digits):
        models = averaged(models, cut(workers, size, iteration))
    assert max(abs(value - mean) for value in models.values()) < 1e-12


@given(st.integers(1, 5), st.integers(0, 5), st.integers(0, 60), st.integers(0, 2**16))
@settings(deadline=None, max_examples=examples(60))
def test_groups_of_powers_of_two_are_full_and_mix_in_as_few_rounds_as_the_bits_need(bits, more, first, seed):
    size, workers = 2**bits, names(2 ** (bits + more))
    models = {worker: math.sin(seed + 7 * rank) for rank, worker in enumerate(workers)}
    mean = sum(models.values()) / len(models)
    for iteration in range(first, first + math.ceil((bits + more) / bits)):
        groups = cut(workers, size, iteration)
        assert {len(group) for group in groups} == {size}
        models = averaged(models, groups)
    assert max(abs(value - mean) for value in models.values()) < 1e-12


@given(st.integers(1, 30), st.integers(2, 9), st.integers(0, 100))
@settings(deadline=None)
def test_groups_are_full_where_the_number_of_workers_is_a_multiple(multiple, size, iteration):
    assert {len(group) for group in cut(names(multiple * size), size, iteration)} == {size}


@given(st.integers(1, 70), st.integers(2, 9), st.integers(0, 100))
@settings(deadline=None)
def test_groups_cut_every_number_of_workers_and_keep_the_mean(count, size, iteration):
    workers = names(count)
    groups = cut(workers, size, iteration)
    assert sorted(worker for group in groups for worker in group) == workers
    assert all(1 <= len(group) <= size for group in groups)
    models = {worker: float(rank**2) for rank, worker in enumerate(workers)}
    after = averaged(models, groups)
    assert sum(after.values()) == pytest.approx(sum(models.values()))
    assert max(after.values()) - min(after.values()) <= max(models.values()) - min(models.values())


@pytest.mark.parametrize("first", [0, 1, 5])
def test_ragged_groups_mix_in_the_rounds_that_the_page_states(first):
    """docs/guide/wagma.md: of any model 1 % at most is missing after so many rounds, whatever the models are."""
    for count in range(2, 65):
        share = torch.eye(count, dtype=torch.float64)
        for iteration in range(first, first + (19 if count < 10 else 11)):
            groups = cut(range(count), default_size(count), iteration)
            share = torch.cat([share[list(group)].mean(0).expand(len(group), -1) for group in groups])[
                torch.tensor([rank for group in groups for rank in group]).argsort()
            ]
        assert (share - 1 / count).abs().sum(1).max() <= 0.01, count


def test_the_group_size_is_the_power_of_two_nearest_the_root():
    sizes = {workers: default_size(workers) for workers in (1, 2, 3, 4, 8, 10, 16, 32, 64, 100, 1024)}
    assert sizes == {1: 2, 2: 2, 3: 2, 4: 2, 8: 2, 10: 4, 16: 4, 32: 4, 64: 8, 100: 8, 1024: 32}


def test_every_tau_plus_one_iterations_all_are_one_group():
    chosen = GroupSettings(size=2, tau=3)
    assert [iteration for iteration in range(12) if chosen.is_global(iteration)] == [3, 7, 11]
    assert groups_of(chosen, names(5), 3) == [tuple(names(5))]
    assert len(groups_of(chosen, names(8), 4)) == 4
    assert all(GroupSettings(tau=0).is_global(iteration) for iteration in range(5))


@pytest.mark.parametrize(
    "wrong", [{"group_size": "1"}, {"group_size": "-1"}, {"tau": "-1"}, {"tau": "x"}, {"late": "never"}, {"late": ""}]
)
def test_settings_that_make_no_sense_are_refused(wrong):
    right = {"update": "average", "group_size": "4", "tau": "5", "late": "paper"}
    assert GroupSettings.parse(right) == GroupSettings(4, 5, "paper")
    assert GroupSettings.parse({"momentum": "0.9"}) is None
    for settings_ in (right | wrong, {key: value for key, value in right.items() if key not in wrong}):
        with pytest.raises(Rejected) as refused:
            GroupSettings.parse(settings_)
        assert refused.value.reason is ErrorCode.BAD_REQUEST


def test_grace_is_bounded_by_the_step_and_by_the_jitter():
    times = StepTimes()
    assert times.grace_seconds(["a", "b"]) == 0.0
    for _ in range(50):
        times.saw("a", 1.0)
    assert times.grace_seconds(["a", "b"]) == 0.0  # steady: nobody comes late by chance
    for step in range(200):
        times.saw("a", 1.02 if step % 2 else 0.98)
    assert times.grace_seconds(["a"]) == pytest.approx(0.04, rel=0.2)
    for step in range(200):
        times.saw("a", 1.8 if step % 2 else 0.2)
    assert times.grace_seconds(["a"]) == pytest.approx(0.25, rel=0.3)


def test_one_long_sleep_does_not_make_a_worker_slow():
    times = StepTimes()
    for _ in range(20):
        times.saw("a", 1.0)
    times.saw("a", 1000.0)
    assert times.grace_seconds(["a"]) < 0.5
    times.forget("a")
    assert times.grace_seconds(["a"]) == 0.0
