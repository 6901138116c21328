"""Costs are found from what pushes leave behind, through noise and drift."""

from dataclasses import replace

import numpy as np
import pytest

from psclient.buckets import bucketing
from psclient.buckets.bucketing import cuts_of
from psclient.buckets.costs import predict
from psclient.buckets.meter import CostMeter, RecursiveLeastSquares
from psclient.buckets.trace import GradientClock
from tests.psclient.merge_makers import COSTS, make_workload, trace_of

SIZES = [2_000_000, *[500, 500, 300_000] * 15, 1_000_000]
WORKLOAD = make_workload(SIZES)
PLANS = [bucketing.by_size(SIZES, 0), bucketing.by_size(SIZES, 1_000_000), bucketing.by_size(SIZES, 3_000_000)]


def samples(rng, count, coefficients, noise):
    for _ in range(count):
        x = rng.uniform(0, 1e6)
        yield (1.0, x), (coefficients[0] + coefficients[1] * x) * (1 + noise * rng.standard_normal())


def make_fit():
    return RecursiveLeastSquares((1e-4, 1e-9), (1e-1, 1e-6), 1e-3)


def feed(fit, rng, count, coefficients, noise=0.1):
    for number, (features, value) in enumerate(samples(rng, count, coefficients, noise)):
        if number % 10 == 0:
            fit.fade()
        fit.observe(features, value)


def test_least_squares_finds_known_costs_under_noise():
    fit = make_fit()
    feed(fit, np.random.default_rng(0), 400, (5e-3, 2e-8))
    assert fit.coefficients == pytest.approx([5e-3, 2e-8], rel=0.15)


def test_it_follows_costs_that_drift():
    fit, rng = make_fit(), np.random.default_rng(1)
    feed(fit, rng, 400, (5e-3, 2e-8))
    feed(fit, rng, 400, (15e-3, 1e-8))
    assert fit.coefficients == pytest.approx([15e-3, 1e-8], rel=0.2)


def test_a_late_sample_now_and_then_does_not_carry_it_away():
    fit, rng = make_fit(), np.random.default_rng(2)
    for number, (features, value) in enumerate(samples(rng, 400, (5e-3, 2e-8), 0.05)):
        if number % 10 == 0:
            fit.fade()
        fit.observe(features, value + (0.5 if number % 40 == 39 else 0.0))
    assert fit.coefficients == pytest.approx([5e-3, 2e-8], rel=0.5)


def test_no_cost_is_negative_and_the_others_make_up_for_it():
    fit, rng = make_fit(), np.random.default_rng(3)
    for x in rng.uniform(1e5, 1e6, 200):
        fit.observe((1.0, x), 2e-8 * x - 1e-3)
    message, byte = fit.coefficients
    assert message == 0
    assert byte == pytest.approx(1.85e-8, rel=0.05)


def test_what_no_sample_shows_any_more_is_kept_and_does_not_blow_up():
    fit, rng = make_fit(), np.random.default_rng(4)
    feed(fit, rng, 200, (5e-3, 2e-8), noise=0.02)
    for _ in range(2000):
        fit.fade()
        fit.observe((1.0, 5e5), 15e-3 * (1 + 0.02 * rng.standard_normal()))
    message, byte = fit.coefficients
    assert message + 5e5 * byte == pytest.approx(15e-3, rel=0.05)
    assert 0 <= message <= 20e-3


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_costs_are_recovered_from_pushes(noise):
    meter = CostMeter(np.array(SIZES, dtype=float))
    for turn in range(20):
        meter.learn(trace_of(PLANS[turn % 3], WORKLOAD, COSTS, (noise, turn)))
    tolerance = 0.05 if noise == 0 else 0.25
    found = meter.costs
    assert found.message == pytest.approx(COSTS.message, rel=tolerance)
    assert found.lead == pytest.approx(COSTS.lead, rel=0.01)
    assert found.tail == pytest.approx(COSTS.tail, rel=0.3)
    whole = found.select(np.array([47.0]), np.array([7.5e6]))
    assert whole == pytest.approx(COSTS.select(np.array([47.0]), np.array([7.5e6])), rel=tolerance)
    assert found.send(np.array([160_000.0])) == pytest.approx(COSTS.send(np.array([160_000.0])), rel=tolerance)


@pytest.mark.parametrize("together", [20_000, 10_000_000])
def test_pushes_are_predicted_whose_groups_share_messages(together):
    costs, meter = replace(COSTS, together=together), CostMeter(np.array(SIZES, dtype=float))
    for turn in range(20):
        meter.learn(trace_of(PLANS[turn % 3], WORKLOAD, costs))
    assert meter.costs.together == together
    for plan in PLANS:
        trace = trace_of(plan, WORKLOAD, costs)
        expected = trace.answered - trace.last_gradient
        assert predict(cuts_of(plan), meter.workload, meter.costs).exposed == pytest.approx(expected, rel=0.1)
        shown = trace.timelines(costs)
        assert [each.arrived for each in shown] == pytest.approx(
            [each.arrived for each in predict(cuts_of(plan), WORKLOAD, costs).groups]
        )


def test_a_group_smaller_than_a_message_costs_a_share_of_it():
    costs = replace(COSTS, together=1000.0)
    assert costs.send_shared(np.array([0.0, 250.0, 4000.0])) == pytest.approx(
        [0.0, costs.message / 4 + 250 * costs.byte, costs.message + 4000 * costs.byte]
    )


def test_the_workload_is_recovered_from_pushes():
    meter = CostMeter(np.array(SIZES, dtype=float))
    for turn in range(3):
        meter.learn(trace_of(PLANS[turn % 3], WORKLOAD, COSTS))
    assert meter.workload.ready == pytest.approx(WORKLOAD.ready)
    assert meter.workload.nbytes == pytest.approx(WORKLOAD.nbytes, rel=0.05)
    assert meter.workload.elements.tolist() == WORKLOAD.elements.tolist()
    assert meter.backward_left[::-1] == pytest.approx(0.1 - WORKLOAD.ready)


def test_a_link_that_becomes_slow_is_noticed_within_twenty_steps():
    meter = CostMeter(np.array(SIZES, dtype=float))
    slow = replace(COSTS, message=8e-3)
    for turn in range(40):
        meter.learn(trace_of(PLANS[turn % 3], WORKLOAD, COSTS if turn < 20 else slow, (0.1, turn)))
    assert meter.costs.message == pytest.approx(8e-3, rel=0.25)


def test_a_tensor_without_a_gradient_costs_nothing():
    meter = CostMeter(np.array(SIZES, dtype=float))
    trace = trace_of(PLANS[0], WORKLOAD, COSTS)
    del trace.entries[0]
    meter.learn(trace)
    assert meter.workload.tensors[-1] == meter.workload.elements[-1] == meter.workload.nbytes[-1] == 0


def test_moments_on_the_host_are_those_of_the_hooks():
    moments = GradientClock(None)
    moments.note(3)
    moments.note(1)
    found = moments.take()
    assert list(found) == [3, 1]
    assert found[3] <= found[1]
    assert moments.take() == {}


@pytest.mark.cuda
def test_moments_on_a_gpu_are_those_of_the_work_and_not_of_its_launch():
    import time

    import torch

    moments = GradientClock(torch.device("cuda", 0))
    a = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(50):
        a @ a
    moments.note(0)
    launched = time.perf_counter()
    torch.cuda.synchronize()
    done = time.perf_counter()
    assert launched < moments.take()[0] <= done + 1e-3
    assert began < launched
