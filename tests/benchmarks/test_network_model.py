"""The model in virtual time, against cases that can be worked out by hand."""

import pytest

from benchmarks.network.events import Cores, Link, Simulator
from benchmarks.network.model import Costs, Network, ReplyCosts, simulate

COMPUTE = 0.33
PUSH, REPLY = 4e6, 3e6
SIZES = Costs(push_size=PUSH, replies=(ReplyCosts(1.0, size=REPLY),))
FAST = Network()


@pytest.mark.parametrize("workers", [1, 2, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_without_costs_the_speedup_is_linear(workers, overlap):
    outcome = simulate(SIZES, FAST, workers, COMPUTE, overlap=overlap)
    assert outcome.steps_per_second == pytest.approx(workers / COMPUTE)
    assert outcome.step_seconds == pytest.approx(COMPUTE)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_full_link_carries_its_rate_and_no_more(overlap):
    """Without overlap workers that share a link fall into step, and it is idle while all of them compute."""
    cap, idle = 10e6 / PUSH, (COMPUTE + REPLY / 10e6) / (16 * PUSH / 10e6)
    outcome = simulate(SIZES, Network(10e6), 16, COMPUTE, overlap=overlap)
    assert (1 - idle - 0.03) * cap <= outcome.steps_per_second <= 1.001 * cap


def test_one_worker_pays_every_byte_and_every_delay():
    network = Network(10e6, delay=0.05)
    outcome = simulate(SIZES, network, 1, COMPUTE, overlap=False)
    assert outcome.step_seconds == pytest.approx(COMPUTE + (PUSH + REPLY) / 10e6 + 2 * 0.05)


def test_one_worker_pays_every_cost_once():
    reply = ReplyCosts(1.0, build=0.04, encode=0.05, install=0.06)
    costs = Costs(select=0.01, encode=0.02, decode=0.03, apply=0.015, call=0.001, replies=(reply,))
    outcome = simulate(costs, FAST, 1, COMPUTE, overlap=False)
    assert outcome.step_seconds == pytest.approx(COMPUTE + 0.01 + 0.02 + 0.03 + 0.015 + 0.001 + 0.15)


@pytest.mark.parametrize("communication", [0.1, 0.3, 0.5, 1.0])
def test_overlap_hides_up_to_the_compute_time(communication):
    """What exceeds it is paid by every second step, as one exchange runs beside the next step and no further."""
    outcome = simulate(Costs(), Network(delay=communication / 2), 1, COMPUTE, overlap=True)
    assert outcome.step_seconds == pytest.approx(max(COMPUTE, (COMPUTE + communication) / 2))


def test_groups_are_sent_while_the_next_is_encoded():
    rate, size = 10e6, 8e6
    costs = Costs(push_size=size, encode=0.4, groups=4)
    outcome = simulate(costs, Network(rate), 1, COMPUTE, overlap=False)
    assert outcome.step_seconds == pytest.approx(COMPUTE + 0.1 + size / rate)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("workers", [1, 7])
def test_no_byte_is_lost_or_made(workers, overlap):
    outcome = simulate(SIZES, Network(1e9, 0.001), workers, COMPUTE, overlap=overlap)
    edge = 1 / 31  # a step of each worker more or less at the ends of what is counted
    assert outcome.up == pytest.approx(PUSH, rel=edge)
    assert outcome.down == pytest.approx(REPLY, rel=edge)


def test_the_apply_thread_is_one():
    outcome = simulate(Costs(apply=0.1), FAST, 16, COMPUTE, overlap=False)
    assert outcome.steps_per_second == pytest.approx(1 / 0.1, rel=0.01)


def test_cores_work_side_by_side():
    costs = Costs(decode=0.2, server_cores=4)
    assert simulate(costs, FAST, 16, COMPUTE, overlap=False).steps_per_second == pytest.approx(4 / 0.2, rel=0.01)


def test_an_exact_reply_grows_with_the_pushes_of_others():
    density = 0.01
    costs = Costs(density=density, replies=(ReplyCosts(0.0), ReplyCosts(1.0, size=1e6)))
    for workers in (1, 4, 16):
        outcome = simulate(costs, Network(1e12), workers, COMPUTE, overlap=False)
        assert outcome.down == pytest.approx(1e6 * (1 - (1 - density) ** workers), rel=0.1)


def test_transfers_share_a_link_equally():
    simulator = Simulator()
    link, ends = Link(simulator, 100.0), []
    for size in (100.0, 300.0):
        link.transfer(size).then(lambda: ends.append(simulator.now))
    simulator.run(lambda: False)
    assert ends == pytest.approx([2.0, 4.0])
    assert link.carried == 400.0


def test_a_transfer_gets_no_more_than_the_card_at_its_other_end():
    simulator = Simulator()
    Link(simulator, 100.0, most=10.0).transfer(100.0)
    simulator.run(lambda: False)
    assert simulator.now == pytest.approx(10.0)


def test_cores_serve_in_order():
    simulator = Simulator()
    cores, ends = Cores(simulator, 2), []
    for seconds in (3.0, 1.0, 1.0, 1.0):
        cores.work(seconds).then(lambda: ends.append(simulator.now))
    simulator.run(lambda: False)
    assert ends == pytest.approx([1.0, 2.0, 3.0, 3.0])
