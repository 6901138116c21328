"""The simulation, against cases that can be worked out by hand."""

import json
from dataclasses import replace

import pytest

from benchmarks.scale import calibration, check
from benchmarks.scale.check import Case
from benchmarks.scale.costs import Costs, from_plain
from benchmarks.scale.events import Link, Simulator
from benchmarks.scale.fits import Curve, Line
from benchmarks.scale.model import Cluster, Pool, simulate
from benchmarks.scale.replies import EXACT_LIMIT, Replies
from benchmarks.scale.transport import CROWD

COMPUTE = 1.0
COSTS = Costs(
    decode=Line(1e-3, 2e-8),
    apply=Line(1e-4, 1e-8),
    union_sort=Line(1e-4, 1e-8),
    union_mark=Line(1e-4, 1e-8),
    union_scan=Line(0.0, 4e-10),
    gather=Line(1e-4, 1e-8),
    copy=Line(0.0, 1e-9),
    encode=Line(1e-4, 1e-8),
    encode_dense=Line(0.0, 4e-9),
    select_all=Line(1e-3, 2e-9),
    select_changed=Line(1e-4, 5e-8),
    push_call=Line(1e-3, 1e-9),
    pull_call=Line(1e-3, 1e-9),
    client_push=Line(1e-3, 1e-9),
    client_pull=Line(1e-3, 1e-9),
    idle=1e-4,
    renewal=5e-4,
    worker_select=Line(0.0, 1e-9),
    worker_encode=Line(0.0, 1e-8),
    worker_install=Line(0.0, 1e-8),
    index_bits=Curve((0.001, 0.01, 0.1), (11.5, 8.1, 4.8)),
    push_frame=130,
    pull_frame=100,
    serial={"decode": 0.3, "encode": 0.3, "union": 0.2, "select": 0.1},
    crowding=0.1,
)
SMALL = Cluster(1_000_000, 0.01, 1, compute=COMPUTE, server_rate=1e9, worker_rate=1e9, down_mode="exact")


def test_one_worker_pays_every_cost_once():
    outcome = simulate(SMALL, replace(COSTS, renewal=0.0), counted=200)
    entries = 10_000
    size = 130 + entries * (4 + 8.1 / 8)
    reply = size - 30
    worker = 1e-3 + 1e-4 + 1e-4
    push = size / 1e9 + COSTS.decode(entries) + COSTS.push_call(size) + COSTS.apply(entries)
    pull = reply / 1e9 + COSTS.gather(entries) + COSTS.encode(entries) + COSTS.pull_call(reply) + COSTS.idle
    # Bytes arrive while the worker still writes; compute times vary, so their mean is what was drawn.
    exchange = worker + push - size / 1e9 + pull
    assert outcome.push_seconds + outcome.pull_seconds == pytest.approx(exchange, rel=1e-6)
    assert outcome.step_seconds == pytest.approx(COMPUTE + exchange, rel=0.1)
    assert outcome.sent == pytest.approx(size)
    assert outcome.received == pytest.approx(reply)
    assert outcome.staleness == 0


def test_a_seed_says_everything():
    cluster = replace(SMALL, workers=20)
    assert simulate(cluster, COSTS, seed=7) == simulate(cluster, COSTS, seed=7)
    assert simulate(cluster, COSTS, seed=7) != simulate(cluster, COSTS, seed=8)


@pytest.mark.parametrize("workers", [1, 20])
@pytest.mark.parametrize("rate", ["server_rate", "worker_rate"])
def test_twice_the_bandwidth_never_slows(workers, rate):
    slow = replace(SMALL, workers=workers, server_rate=4e6, worker_rate=4e6)
    fast = replace(slow, **{rate: 8e6})
    assert simulate(fast, COSTS).steps_per_second >= 0.99 * simulate(slow, COSTS).steps_per_second


@pytest.mark.parametrize("load", [0.3, 0.6, 0.9])
def test_a_queue_is_as_long_as_pollaczek_and_khinchine_say(load):
    """Many thinking workers and one place with a constant service time are nearly M/D/1, and a closed one is kinder."""
    service, workers = 1e-3, 200
    costs = Costs(push_call=Line(service, 0.0))
    cluster = Cluster(1000, 0.01, workers, compute=workers * service / load, down_mode="exact")
    outcome = simulate(cluster, costs, counted=20)
    waiting = service * load / (2 * (1 - load))
    assert outcome.used["interpreter"] == pytest.approx(load, rel=0.05)
    assert outcome.push_seconds <= 1.15 * (service + waiting)
    assert outcome.push_seconds >= service + 0.5 * waiting


@pytest.mark.parametrize(
    ("costs", "resource", "most"),
    [
        (Costs(push_call=Line(0.01, 0.0)), "interpreter", 100.0),
        (Costs(apply=Line(0.02, 0.0)), "apply thread", 50.0),
        (Costs(decode=Line(0.0, 0.004)), "cores", 50.0),
    ],
)
def test_a_saturated_resource_gives_what_it_has(costs, resource, most):
    cluster = Cluster(1000, 0.01, 200, compute=COMPUTE, server_cores=2, down_mode="exact")
    outcome = simulate(cluster, costs)
    assert outcome.used[resource] == pytest.approx(1.0, abs=0.02)
    assert outcome.steps_per_second == pytest.approx(most, rel=0.03)


def test_a_handover_costs_where_works_wait_for_one_another_and_nowhere_else():
    costs = Costs(push_call=Line(0.01, 0.0))
    cluster = Cluster(1000, 0.01, 200, compute=COMPUTE, server_cores=2, down_mode="exact")
    crowded = simulate(cluster, replace(costs, handover=0.01))
    assert crowded.steps_per_second == pytest.approx(50, rel=0.03)
    alone = replace(cluster, workers=1)
    assert simulate(alone, replace(costs, handover=0.01)) == simulate(alone, costs)


@pytest.mark.long
def test_a_handover_is_found_from_what_a_crowd_reached():
    crowd = Case("crowd", 200_000, 0.01, 1, 0.0, "exact")
    costs = replace(COSTS, handover=7e-4)
    rate = check.replay(crowd, CROWD, costs, 2, seed=0).steps_per_second
    assert calibration.handover(COSTS, crowd, rate, 2, seed=0) == pytest.approx(7e-4, rel=0.1)


def test_an_exact_reply_has_what_was_pushed_while_it_waited_for_the_apply_thread():
    """However long the apply thread's queue is, replies carry as many entries as pushes have brought."""
    costs = Costs(apply=Line(4e-3, 0.0), index_bits=Curve((0.001, 0.1), (0.0, 0.0)))
    cluster = replace(SMALL, density=1e-6, workers=40, compute=0.01)
    outcome = simulate(cluster, costs, counted=40)
    assert outcome.used["apply thread"] > 0.98
    assert outcome.received == pytest.approx(4 * 40, rel=0.02)


def test_every_push_of_another_is_seen_as_staleness():
    """With nobody waiting, each of the others pushes once between two pushes of a worker."""
    outcome = simulate(replace(SMALL, workers=40), Costs(), counted=60)
    assert outcome.staleness == pytest.approx(39, rel=0.03)


@pytest.mark.parametrize("down_mode", ["exact", "topk", "auto"])
def test_one_shard_for_all_is_each_of_them(down_mode):
    cluster = replace(SMALL, workers=12, shards=4, down_mode=down_mode)
    one, each = simulate(cluster, COSTS), simulate(replace(cluster, each_shard=True), COSTS)
    assert one.steps_per_second == pytest.approx(each.steps_per_second, rel=1e-6)
    assert one.staleness == pytest.approx(each.staleness, rel=1e-6)
    assert one.sent == pytest.approx(each.sent, rel=1e-6)
    assert one.received == pytest.approx(each.received, rel=0.02)


def test_no_byte_is_lost_or_made():
    cluster = replace(SMALL, workers=30, shards=4, each_shard=True, server_rate=1e8, worker_rate=1e8)
    outcome = simulate(cluster, COSTS, counted=30)
    entries = 10_000
    assert outcome.sent == pytest.approx(4 * 130 + entries * (4 + 8.1 / 8), rel=0.05)
    assert 0 <= outcome.used["card in"] <= 1
    carried = outcome.steps_per_second * outcome.sent / 4 / 1e8
    assert outcome.used["card in"] == pytest.approx(carried)


def test_a_crowd_that_waits_for_one_place_is_served_in_order():
    """Whoever gives a place back lets the next one go on, who gives it back at once: 1,000 deep, that was too deep."""
    simulator, served = Simulator(), []
    place = Pool(simulator, 1)

    def worker(number):
        yield place.take()
        if not number:
            yield simulator.wait(1.0)
        place.give()
        served.append(number)

    for number in range(5000):
        simulator.start(worker(number))
    simulator.run(lambda: False)
    assert served == [*range(5000)]


def test_a_room_that_is_too_small_is_given_whole():
    """However little calls may occupy, the oldest gets through; nothing stands still."""
    cluster = replace(SMALL, workers=8, inflight_bytes=1000.0)
    assert simulate(cluster, COSTS).steps_per_second > 0


def test_clients_on_the_same_machine_take_their_share_of_its_cores():
    alone = replace(SMALL, workers=16, compute=0.001, server_cores=2)
    outcome = simulate(replace(alone, replay=True), COSTS)
    assert outcome.used["cores"] <= 1.0 + 1e-9
    assert (
        outcome.steps_per_second
        < simulate(replace(alone, replay=True), replace(COSTS, client_push=Line())).steps_per_second
    )


class Place:
    in_topk, calm = False, 0


def test_auto_leaves_exact_replies_where_too_much_changes_and_comes_back():
    replies, place = Replies(COSTS, 1e6, 0.01, "auto"), Place()
    assert not replies.after(5, place).topk
    assert replies.union(20) > EXACT_LIMIT
    assert replies.after(20, place).topk
    assert replies.after(1, place).topk
    assert not [replies.after(1, place) for _ in range(64)][-1].topk


def test_a_window_that_the_ledger_has_forgotten_is_answered_densely_and_moves_auto():
    assert Replies(COSTS, 1e6, 0.01, "auto").after(101, Place()).topk
    reply = Replies(COSTS, 1e6, 0.01, "exact").after(101, Place())
    assert reply.size == pytest.approx(100 + 4e6)
    assert not reply.topk


def test_costs_survive_json():
    assert from_plain(json.loads(json.dumps(COSTS.plain()))) == COSTS


@pytest.mark.parametrize("workers", [1, 2, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_without_costs_the_speedup_is_linear(workers, overlap):
    cluster = replace(SMALL, workers=workers, overlap=overlap, server_rate=float("inf"), worker_rate=float("inf"))
    outcome = simulate(cluster, COSTS.free(), counted=200)
    assert outcome.steps_per_second == pytest.approx(workers / COMPUTE, rel=0.05)


def test_a_dense_push_has_no_indices_and_is_as_large_as_the_model():
    cluster = replace(SMALL, density=1.0)
    assert simulate(cluster, COSTS, counted=20).sent == pytest.approx(4 * 1_000_000 + 130, rel=1e-3)


def test_overlap_hides_what_is_shorter_than_compute():
    cluster = replace(SMALL, server_rate=1e5, worker_rate=1e5)  # half a second each way
    plain, hidden = (
        simulate(replace(cluster, overlap=overlap), COSTS.free(), counted=200) for overlap in (False, True)
    )
    assert plain.step_seconds == pytest.approx(COMPUTE + 1.0, rel=0.05)
    assert hidden.step_seconds < plain.step_seconds - 0.5


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
