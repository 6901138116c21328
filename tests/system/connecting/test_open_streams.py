"""Streams that stay open: many requests each, in order, until a refusal, an idle time without a lease, or a stop."""

import grpc
import pytest

from psclient import LocalServer
from pscore.wire.errors import ErrorCode
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.rpc import dispatcher
from tests.system.raw import TIMEOUT, RawWorker, Stream, joined, pull_of, push_of
from tests.system.tools import wait_until

N = 50


@pytest.fixture(scope="module")
def server():
    with LocalServer(down_mode="exact", lease_seconds=60) as running:
        yield running


@pytest.fixture
def worker(server):
    return joined(server.addresses[0], N)


def test_many_pushes_in_any_number_of_messages_are_answered_in_order(worker):
    stream = Stream(worker.stub.PushSparse)
    first = worker.version
    for step in range(1, 10):  # all are sent before the first answer is read
        stream.send(*push_of(worker, step, base=first, cut=step % 3 + 1))
    assert [next(stream.call).version for _ in range(9)] == [first + step for step in range(1, 10)]
    stream.send(*push_of(worker, 9, base=first))
    assert next(stream.call).repeated_push
    stream.end()
    assert list(stream.call) == []


def test_a_refusal_ends_the_stream_and_nothing_behind_it_is_applied(worker):
    stream, first = Stream(worker.stub.PushSparse), worker.version
    stream.send(*push_of(worker, 5, base=first))
    assert next(stream.call).version == first + 1
    stream.send(*push_of(worker, 3, base=first), *push_of(worker, 6, base=first))
    assert stream.reason() is ErrorCode.STEP_OUT_OF_ORDER
    again = Stream(worker.stub.PushSparse)
    again.send(*push_of(worker, 6, base=first))
    answer = next(again.call)
    assert (answer.version, answer.repeated_push) == (first + 2, False)


def test_a_message_behind_a_commit_must_begin_a_push(worker):
    stream = Stream(worker.stub.PushSparse)
    push = push_of(worker, 1, base=worker.version, cut=3)
    stream.send(*push, push[1])
    assert next(stream.call).version == worker.version + 1
    assert stream.reason() is ErrorCode.BAD_REQUEST


def test_a_pull_that_names_a_step_waits_for_its_push(worker):
    pushes, pulls = Stream(worker.stub.PushSparse), Stream(worker.stub.PullDiff)
    base = worker.version
    for step in range(1, 30):
        pulls.send(pull_of(worker, base_version=base, after_step=step))
        pushes.send(*push_of(worker, step, base=base))
        reply = next(pulls.call)
        assert reply.header.version == base + 1
        assert [(chunk.start, chunk.count) for chunk in reply.chunks] == [(step, 1)]
        assert reply.HasField("commit")
        assert next(pushes.call).version == base + 1
        base += 1


def test_a_pull_whose_push_never_comes_ends_with_the_lease():
    with LocalServer(down_mode="exact", lease_seconds=1.0, stream_idle_seconds=2.0) as server:
        worker = RawWorker(server.addresses[0], "w", N)
        worker.join()
        pulls = Stream(worker.stub.PullDiff)
        pulls.send(pull_of(worker, base_version=0, after_step=7))
        assert stream_ends(pulls) in (grpc.StatusCode.CANCELLED, grpc.StatusCode.NOT_FOUND)


def stream_ends(stream):
    with pytest.raises(grpc.RpcError) as caught:
        next(stream.call)
    return caught.value.code()


def test_a_pull_without_a_lease_does_not_wait(worker):
    worker.stub.Leave(pb.LeaveRequest(identity=worker.identity), timeout=TIMEOUT)
    pulls = Stream(worker.stub.PullDiff)
    pulls.send(pull_of(worker, after_step=7))
    assert pulls.reason() is ErrorCode.LEASE_EXPIRED


def test_another_idle_stream_of_a_worker_takes_the_place_of_the_first(worker):
    first, second = Stream(worker.stub.PushSparse), Stream(worker.stub.PushSparse)
    first.send(*push_of(worker, 1, base=worker.version))
    next(first.call)
    second.send(*push_of(worker, 2, base=worker.version))
    next(second.call)
    assert stream_ends(first) is grpc.StatusCode.CANCELLED
    second.send(*push_of(worker, 3, base=worker.version))
    assert next(second.call).version == worker.version + 3


def test_an_idle_stream_stays_as_long_as_the_lease(start):
    server = start(stream_idle_seconds=0.5)
    worker = joined(server.address, N)
    stream = Stream(worker.stub.PushSparse)
    stream.send(*push_of(worker, 1))
    next(stream.call)
    swept = server._dispatcher
    wait_until(lambda: swept._sweeping is not None)
    wait_until(lambda: all(each.is_idle for each in swept.open_calls))
    (opened,) = swept.open_calls
    opened.started -= 100  # seconds of silence
    worker_leaves = Stream(worker.stub.PullDiff)
    worker_leaves.send(pull_of(worker))
    next(worker_leaves.call)
    assert opened in swept.open_calls
    worker.stub.Leave(pb.LeaveRequest(identity=worker.identity), timeout=TIMEOUT)
    assert stream_ends(stream) is grpc.StatusCode.CANCELLED
    wait_until(lambda: opened not in swept.open_calls)


def test_a_server_that_stops_ends_idle_streams_at_once(start):
    server = start()
    worker = joined(server.address, N)
    stream = Stream(worker.stub.PushSparse)
    stream.send(*push_of(worker, 1))
    next(stream.call)
    server._loop.run(server._dispatcher.drain(TIMEOUT))
    assert stream.reason() is ErrorCode.DRAINING


def test_a_pull_that_waits_occupies_memory_that_is_counted(start):
    server = start()
    worker = joined(server.address, N)
    pushes, pulls = Stream(worker.stub.PushSparse), Stream(worker.stub.PullDiff)
    budget = server._dispatcher._request_budget
    pulls.send(pull_of(worker, after_step=1))
    wait_until(lambda: budget.total > 0)
    pushes.send(*push_of(worker, 1))
    assert next(pulls.call).header.version == 1
    wait_until(lambda: budget.total == 0)


def test_silent_streams_of_many_workers_stay_open(start, monkeypatch):
    """Beyond the bound for everybody, two for each worker with a lease."""
    monkeypatch.setattr(dispatcher, "_MOST_SILENT", 4)
    server = start()
    workers = [RawWorker(server.address, f"w{number}", N) for number in range(6)]
    for each in workers:
        each.join()
    streams = [Stream(method) for each in workers for method in (each.stub.PushSparse, each.stub.PullDiff)]
    wait_until(lambda: len(server._dispatcher._silent) == 12)
    silent = [Stream(workers[0].stub.PushSparse) for _ in range(8)]
    wait_until(lambda: len(server._dispatcher.open_calls) == 16)
    for number in (4, 6, 8, 10):  # the four oldest have given way
        streams[number].send(*push_of(workers[number // 2], 1))
    assert sorted(next(streams[number].call).version for number in (4, 6, 8, 10)) == [1, 2, 3, 4]
    assert stream_ends(streams[0]) is grpc.StatusCode.CANCELLED
    for stream in (*streams, *silent):
        stream.end()
