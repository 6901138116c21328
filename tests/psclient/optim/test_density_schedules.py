"""Density schedules, and learning-rate schedules that follow the server's version."""

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.optim import lr_scheduler

from psclient.schedules import VersionClock, dgc_warmup


@pytest.mark.parametrize("steps_per_epoch", [1, 10, 391])
def test_the_warm_up_of_dgc_is_four_epochs_then_final(steps_per_epoch):
    density = dgc_warmup(steps_per_epoch)
    found = [density(step) for step in range(1, 6 * steps_per_epoch + 1)]
    expected = [rho for rho in (0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001) for _ in range(steps_per_epoch)]
    assert found == expected


def test_the_warm_up_ends_where_it_is_told():
    assert dgc_warmup(2, final=0.02)(9) == 0.02


@pytest.mark.parametrize("final", [0.001, 0.01, 0.05, 0.5, 1.0])
def test_the_warm_up_comes_down_to_its_end_and_never_below(final):
    found = [dgc_warmup(1, final)(step) for step in range(1, 8)]
    assert found == sorted(found, reverse=True)
    assert min(found) == found[-1] == final


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


@pytest.mark.parametrize("wrap", ["none", "sequential", "chained"])
def test_a_schedule_with_an_end_stays_there_however_many_updates_there_are(wrap):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10)
    if wrap == "sequential":
        warm_up = lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=3)
        scheduler = lr_scheduler.SequentialLR(optimizer, [warm_up, scheduler], milestones=[3])
    elif wrap == "chained":
        scheduler = lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(optimizer, 0.5), scheduler])
    clock = VersionClock(scheduler, SimpleNamespace(version=0))
    rates = []
    for version in range(0, 40, 3):
        clock.optimizer.version = version
        optimizer.step()
        clock.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert len({*rates[:4]}) == 4
    assert len({*rates[-8:]}) == 1
    assert rates[-1] < 0.1


def test_an_inner_schedule_that_has_ended_holds_up_no_later_one():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    parts = [lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=4), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    scheduler = lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])
    clock = VersionClock(scheduler, SimpleNamespace(version=9))
    optimizer.step()
    clock.step()
    assert clock.steps == 9


def test_the_clock_needs_versions():
    with pytest.raises(ValueError, match="versions_per_step"):
        VersionClock(CountingScheduler(), SimpleNamespace(version=0), versions_per_step=0)


def sequential(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])


SCHEDULERS = {
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "steps": lambda o: lr_scheduler.StepLR(o, 7, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 40),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 9),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=41),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=30),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 35, power=2.0),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.95),
    "sequential": sequential,
}


def a_run(scheduler, version):
    """A worker's optimizer with two groups of rates, and the clock that drives both."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": rate} for rate in (1.0, 0.1)]
    optimizer = torch.optim.SGD(groups, momentum=0.5)
    return optimizer, VersionClock(SCHEDULERS[scheduler](optimizer), SimpleNamespace(version=version))


def rates_from(optimizer, clock, versions):
    found = []
    for version in versions:
        clock.optimizer.version = version
        optimizer.step()
        clock.step()
        found.append([group["lr"] for group in optimizer.param_groups])
    return found


@pytest.mark.parametrize("order", [*itertools.permutations(("optimizer", "clock")), "scheduler made last"], ids=str)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_resumed_clock_goes_on_as_if_it_had_not_been_stopped(scheduler, order):
    whole = rates_from(*a_run(scheduler, 0), range(1, 41))
    optimizer, clock = a_run(scheduler, 0)
    rates_from(optimizer, clock, range(1, 26))
    saved = copy.deepcopy({"optimizer": optimizer.state_dict(), "clock": clock.state_dict()})
    if order == "scheduler made last":  # its constructor multiplies the rate that was loaded
        optimizer, _ = a_run(scheduler, 27)
        optimizer.load_state_dict(saved["optimizer"])
        clock = VersionClock(SCHEDULERS[scheduler](optimizer), SimpleNamespace(version=27))
        clock.load_state_dict(saved["clock"])
    else:
        optimizer, clock = a_run(scheduler, 27)
        for name in order:
            {"optimizer": optimizer, "clock": clock}[name].load_state_dict(saved[name])
    found = rates_from(optimizer, clock, range(27, 41))  # others have pushed two versions meanwhile
    for expected, rates in zip(whole[26:], found, strict=True):
        assert rates == pytest.approx(expected)
