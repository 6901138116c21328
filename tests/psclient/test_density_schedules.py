"""Density schedules, and learning-rate schedules that follow the server's version."""

from types import SimpleNamespace

import pytest

from psclient.schedules import VersionClock, constant, dgc_warmup


def test_constant_is_constant():
    assert {constant(0.3)(step) for step in range(1, 100)} == {0.3}


@pytest.mark.parametrize("steps_per_epoch", [1, 10, 391])
def test_the_warm_up_of_dgc_is_four_epochs_then_final(steps_per_epoch):
    density = dgc_warmup(steps_per_epoch)
    found = [density(step) for step in range(1, 6 * steps_per_epoch + 1)]
    expected = [rho for rho in (0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001) for _ in range(steps_per_epoch)]
    assert found == expected


def test_the_warm_up_ends_where_it_is_told():
    assert dgc_warmup(2, final=0.02)(9) == 0.02


@pytest.mark.parametrize("steps", [0, -1])
def test_an_epoch_has_steps(steps):
    with pytest.raises(ValueError, match="steps_per_epoch"):
        dgc_warmup(steps)


class CountingScheduler:
    def __init__(self):
        self.steps = 0

    def step(self):
        self.steps += 1


def test_the_clock_steps_as_often_as_the_version_asks_for():
    scheduler, optimizer = CountingScheduler(), SimpleNamespace(version=0)
    clock = VersionClock(scheduler, optimizer, versions_per_step=10)
    seen = []
    for version in (0, 9, 10, 11, 19, 20, 55, 55):
        optimizer.version = version
        clock.step()
        seen.append(scheduler.steps)
    assert seen == [0, 0, 1, 1, 1, 2, 5, 5]


def test_a_late_joiner_catches_up_at_once():
    scheduler = CountingScheduler()
    VersionClock(scheduler, SimpleNamespace(version=1000)).step()
    assert scheduler.steps == 1000


def test_a_version_that_fell_back_takes_no_step_back():
    scheduler, optimizer = CountingScheduler(), SimpleNamespace(version=30)
    clock = VersionClock(scheduler, optimizer)
    clock.step()
    optimizer.version = 10
    clock.step()
    assert scheduler.steps == 30


def test_the_clock_needs_versions():
    with pytest.raises(ValueError, match="versions_per_step"):
        VersionClock(CountingScheduler(), SimpleNamespace(version=0), versions_per_step=0)
