"""Draining and evicting without a network: what is refused, what goes on, and that nothing is lost or counted twice."""

import contextlib
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.apply_thread import ApplyThread
from psservice.data_leases.dataset import Plan, SampleRequest
from psservice.membership.admission import DrainGate
from psservice.rpc.calls import handlers_of
from psservice.rpc.operators import OperatorCalls
from psservice.shard.buffers import open_exchange
from psservice.shard.join import evict
from psservice.shard.model_install import open_upload
from psservice.shard.push import check_push
from psservice.shard.samples import lease_samples
from psservice.storage.files import Files
from psservice.values import Identity
from tests.hostile.service import Ended, called
from tests.psservice.service_makers import F32, layout_of
from tests.psservice.shard_makers import (
    ANNA,
    BERT,
    HOUR,
    join,
    last_push,
    open_shards,
    pull,
    push,
    reason_of,
    serving,
    theta,
    with_clock,
)

LAYOUT = layout_of((6, F32), (4, F32))
ONES = torch.ones(10)


@pytest.fixture
def shard():
    with serving(LAYOUT, ONES) as shard:
        yield shard


def calls_of(shard):
    """The operators' calls, and what they have told the process."""
    told = []
    handlers = handlers_of(OperatorCalls(shard, lambda: 0, lambda: told.append("changed"), lambda: told.append("stop")))
    return lambda rpc, request: called(shard, handlers[rpc], rpc, request)[0], told


def test_a_door_counts_who_is_inside_and_lets_nobody_in_while_it_is_closed():
    door = DrainGate()
    with door:
        door.require_open()
        door.is_closed = True
        assert door.in_flight == 1
        assert reason_of(door.require_open) is ErrorCode.DRAINING
    assert (door.in_flight, door.is_closed) == (0, True)
    door.is_closed = False
    door.require_open()


def test_nothing_comes_in_behind_a_count_that_has_reached_zero():
    door, acted, counts = DrainGate(), [], []

    def call():
        with door:
            try:
                door.require_open()
            except Rejected:
                return
            acted.append(1)

    threads = [threading.Thread(target=call) for _ in range(40)]
    for number, thread in enumerate(threads):
        if number == 20:
            door.is_closed = True
            while door.in_flight:
                pass
            counts.append(len(acted))
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(acted)] == counts


def test_a_closed_shard_refuses_what_changes_it_and_answers_the_rest(shard):
    push(shard, 1, {0: 1.0})
    call, told = calls_of(shard)
    answer = call("Drain", pb.DrainRequest(action=pb.DRAIN_ACTION_CLOSE))
    assert (answer.draining, answer.calls_inside, answer.version, answer.stopping) == (True, 0, 1, False)
    assert told == ["changed"]
    wish = SampleRequest("train", Plan(10, 0, False), 0, 3, {})
    for refused in (
        lambda: check_push(shard, ANNA, 2),
        lambda: join(shard, LAYOUT, BERT),
        lambda: lease_samples(shard, ANNA, wish),
        lambda: open_upload(shard, ANNA, 1, 0),
        lambda: open_exchange(shard, ANNA, 1),
    ):
        assert reason_of(refused) is ErrorCode.DRAINING
    assert pull(shard, base=0).version == 1
    shard.leases.require(ANNA)
    call("Drain", pb.DrainRequest(action=pb.DRAIN_ACTION_OPEN))
    check_push(shard, ANNA, 2)
    assert push(shard, 2)[0].version == 2


def test_a_push_that_was_inside_when_the_door_closed_is_applied(shard):
    check_push(shard, ANNA, 1)
    shard.drain_gate.is_closed = True
    assert push(shard, 1, {0: 1.0})[0].version == 1
    assert theta(shard)[0] == 0.0


def test_the_process_is_stopped_when_nothing_is_under_way_and_not_before(shard):
    call, told = calls_of(shard)
    stop = pb.DrainRequest(action=pb.DRAIN_ACTION_STOP)
    with shard.drain_gate:
        assert not call("Drain", stop).stopping
    assert told == ["changed"]
    assert call("Drain", stop).stopping
    assert told == ["changed", "changed", "stop"]


@pytest.mark.parametrize("action", [0, 4, 1000])
def test_an_unknown_action_changes_nothing(action, shard):
    call, told = calls_of(shard)
    with pytest.raises(Ended, match="INVALID_ARGUMENT"):
        call("Drain", pb.DrainRequest(action=action))
    assert (shard.drain_gate.is_closed, told) == (False, [])


def test_an_evicted_worker_has_lost_its_lease_and_not_its_record(shard):
    first, _ = push(shard, 1, {0: 1.0})
    assert evict(shard, "anna", 0.0).identity == ANNA
    assert reason_of(push, shard, 2, {0: 1.0}) is ErrorCode.LEASE_EXPIRED
    assert last_push(join(shard, LAYOUT, ANNA)) == ("1", 1)
    assert push(shard, 1, {0: 1.0}) == (first, True), "a repeat is answered, not applied"
    assert push(shard, 2, {0: 1.0})[0].version == 2


def test_a_push_that_waits_for_the_writer_is_refused_behind_an_eviction(shard, monkeypatch):
    before = theta(shard)
    run = ApplyThread.run

    def evict_first(writer, job):
        monkeypatch.setattr(ApplyThread, "run", run)
        evict(shard, "anna", 60.0)
        return run(writer, job)

    monkeypatch.setattr(ApplyThread, "run", evict_first)
    assert reason_of(push, shard, 1, {0: 1.0}) is ErrorCode.EVICTED
    assert torch.equal(theta(shard), before)


def test_a_ban_is_on_the_name_and_ends_by_itself_or_by_another_call(shard):
    clock = with_clock(shard)
    evict(shard, "anna", 60.0)
    for who in (ANNA, Identity("anna", "2")):
        assert reason_of(join, shard, LAYOUT, who) is ErrorCode.EVICTED
    assert reason_of(shard.leases.require, ANNA) is ErrorCode.EVICTED
    join(shard, LAYOUT, BERT)
    clock.now = 59.0
    with pytest.raises(Rejected) as told:
        join(shard, LAYOUT, ANNA)
    assert told.value.retry_seconds == pytest.approx(1.0)
    clock.now = 60.0
    join(shard, LAYOUT, ANNA)
    evict(shard, "anna", 60.0)
    assert evict(shard, "anna", 0.0) is None, "it held no lease, and is let in"
    join(shard, LAYOUT, ANNA)


def test_samples_of_an_evicted_worker_are_handed_to_others(shard):
    wish = SampleRequest("train", Plan(4, 0, False), 0, 4, {})
    held = lease_samples(shard, ANNA, wish).granted
    join(shard, LAYOUT, BERT)
    evict(shard, "anna", HOUR)
    assert lease_samples(shard, BERT, wish).granted == held


def test_nobody_of_that_name_is_told(shard):
    assert reason_of(evict, shard, "nobody", 0.0) is ErrorCode.NO_SUCH_WORKER
    assert shard.leases.evicted() == {}


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf, 8 * 24 * HOUR])
def test_a_time_that_makes_no_sense_evicts_nobody(seconds, shard):
    call, _ = calls_of(shard)
    with pytest.raises(Ended, match="INVALID_ARGUMENT"):
        call("EvictWorker", pb.EvictWorkerRequest(worker_id="anna", ban_seconds=seconds))
    shard.leases.require(ANNA)


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 257])
def test_a_name_that_is_none_evicts_nobody(name, shard):
    call, _ = calls_of(shard)
    with pytest.raises(Ended, match="INVALID_ARGUMENT"):
        call("EvictWorker", pb.EvictWorkerRequest(worker_id=name))


def test_an_eviction_is_remembered_by_the_journal(tmp_path):
    with serving(LAYOUT, ONES, data_dir=tmp_path) as shard:
        push(shard, 1, {0: 1.0})
        evict(shard, "anna", 60.0)
    with open_shards(data_dir=tmp_path) as (shard,):
        assert len(shard.leases) == 0
        assert last_push(join(shard, LAYOUT, ANNA)) == ("1", 1), "who was kept out is forgotten, what it pushed is not"


def test_two_snapshots_of_one_name_at_the_same_time_are_one(tmp_path, monkeypatch):
    writing, go_on = threading.Event(), threading.Event()
    with serving(LAYOUT, ONES, data_dir=tmp_path) as shard:
        save = Files.save_tensors

        def slow(files, path, tensors):
            writing.set()
            assert go_on.wait(30)
            save(files, path, tensors)

        monkeypatch.setattr(Files, "save_tensors", slow)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(shard.durability.take_asked, "same")
            assert writing.wait(30)
            second = pool.submit(reason_of, shard.durability.take_asked, "same")
            with contextlib.suppress(TimeoutError):
                second.result(0.5)  # it waits for the first, whose name is not there yet
            go_on.set()
            assert first.result(30).manifest.checkpoint == "same"
            assert second.result(30) is ErrorCode.BAD_REQUEST
