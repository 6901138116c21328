"""Calls that wait for other workers stay open: answered once their condition holds, or refused at their deadline."""

import json
import threading

import grpc
import pytest

from pscore.wire.errors import ErrorCode, details_of
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.system.raw import TIMEOUT, RawWorker, Stream, commit_of, dense_chunk, pull_of, push_of
from tests.system.tools import wait_until

N = 50
LONG = 600.0  # beyond the end of any test
ROUNDS = {"rounds": json.dumps({"quorum": 0, "seconds": 0, "start_workers": 1})}
WAGMA = {"groups": json.dumps({"size": 2, "tau": 4, "replace": False})}


class Worker(RawWorker):
    """A worker of a run with settings of its method."""

    def __init__(self, address, name, settings=None):
        super().__init__(address, name, N)
        self.settings = settings or {}
        self.pushes, self.pulls = Stream(self.stub.PushSparse), Stream(self.stub.PullDiff)

    def join(self):
        super().join(method_settings=self.settings)
        return self

    def send_push(self, step, **fields):
        self.pushes.send(*push_of(self, step, base=self.version, **fields))

    def send_pull(self, **fields):
        self.pulls.send(pull_of(self, base_version=self.version, **fields))


def waiting(server):
    return len(server.shard.leases.waiters)


def until_waiting(server, count=1):
    """Return once so many calls wait, none of which holds a thread."""
    wait_until(lambda: waiting(server) == count)
    wait_until(lambda: all(not pool.at_work for pool in server._dispatcher._pools.values()))


class Round:
    """A pull of a contributor to the open round; the other worker's push closes it."""

    settings, method, reason = {}, ROUNDS, ErrorCode.ROUND_OPEN

    def begin(self, anna, bert):
        anna.send_push(1)
        next(anna.pushes.call)

    def call(self, anna, **fields):
        anna.send_pull(**fields)
        return anna.pulls

    def meet(self, anna, bert):
        bert.send_push(1)
        assert next(bert.pushes.call).version == 1

    def answered(self, answer):
        assert answer.header.version == 1


class Lead:
    """A push that is too far ahead of the other worker, who then pushes."""

    settings, method, reason = {"ssp_bound": 1}, {}, ErrorCode.TOO_FAR_AHEAD

    def begin(self, anna, bert):
        anna.send_push(1)
        next(anna.pushes.call)

    def call(self, anna, **fields):
        anna.send_push(2, **fields)
        return anna.pushes

    def meet(self, anna, bert):
        bert.send_push(1)
        next(bert.pushes.call)

    def answered(self, answer):
        assert (answer.version, answer.repeated_push) == (3, False)


class Install:
    """A push while another model is being installed."""

    settings, method, reason = {}, {}, ErrorCode.BUSY

    def begin(self, anna, bert):
        self.shard.apply_thread.held = True

    def call(self, anna, **fields):
        anna.send_push(1, **fields)
        return anna.pushes

    def meet(self, anna, bert):
        self.shard.apply_thread.held = False
        self.shard.leases.waiters.wake()

    def answered(self, answer):
        assert answer.version == 1


KINDS = pytest.mark.parametrize("kind", [Round, Lead, Install])


def two(start, kind):
    server, made = start(**kind.settings), kind()
    made.shard = server.shard
    anna, bert = (Worker(server.address, name, kind.method).join() for name in ("anna", "bert"))
    made.begin(anna, bert)
    return server, made, anna, bert


@KINDS
def test_a_call_that_may_wait_is_answered_when_its_condition_holds_and_holds_no_thread(start, kind):
    server, made, anna, bert = two(start, kind)
    stream = made.call(anna, wait_seconds=LONG)
    until_waiting(server)
    made.meet(anna, bert)
    made.answered(next(stream.call))
    assert waiting(server) == 0


@KINDS
@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_at_its_deadline_a_call_is_refused_in_the_words_for_its_reason(start, kind, seconds):
    server, made, anna, bert = two(start, kind)
    stream = made.call(anna, wait_seconds=seconds)
    assert stream.reason() is made.reason
    assert waiting(server) == 0
    made.meet(anna, bert)


@KINDS
def test_who_hangs_up_waits_no_more(start, kind):
    server, made, anna, bert = two(start, kind)
    stream = made.call(anna, wait_seconds=LONG)
    until_waiting(server)
    stream.call.cancel()
    wait_until(lambda: waiting(server) == 0)
    made.meet(anna, bert)


@KINDS
def test_a_call_whose_lease_ends_waits_no_more(start, kind):
    server, made, anna, bert = two(start, kind)
    stream = made.call(anna, wait_seconds=LONG)
    until_waiting(server)
    anna.stub.Leave(pb.LeaveRequest(identity=anna.identity), timeout=TIMEOUT)
    assert stream.reason() in (ErrorCode.LEASE_EXPIRED, ErrorCode.BUSY)
    made.meet(anna, bert)


@KINDS
def test_a_server_that_stops_ends_waits_at_once(start, kind):
    server, made, anna, _ = two(start, kind)
    stream = made.call(anna, wait_seconds=LONG)
    until_waiting(server)
    server._loop.run(server._dispatcher.drain(TIMEOUT))
    assert stream.reason() is ErrorCode.DRAINING
    server.shard.apply_thread.held = False


def test_a_drain_does_not_wait_for_a_push_that_waits(start):
    server, made, anna, bert = two(start, Lead)
    stream = made.call(anna, wait_seconds=LONG)
    until_waiting(server)
    bert.stub.Drain(pb.DrainRequest(action=pb.DRAIN_ACTION_CLOSE), timeout=TIMEOUT)
    assert stream.reason() is ErrorCode.DRAINING
    drained = bert.stub.Drain(pb.DrainRequest(action=pb.DRAIN_ACTION_CLOSE), timeout=TIMEOUT)
    assert drained.calls_inside == 0


def test_a_rollback_ends_the_wait_for_a_round_that_it_drops(start, tmp_path):
    server = start(data_dir=tmp_path)
    anna, bert = (Worker(server.address, name, ROUNDS).join() for name in ("anna", "bert"))
    taken = bert.stub.TakeSnapshot(pb.TakeSnapshotRequest(), timeout=TIMEOUT)
    anna.send_push(1)
    next(anna.pushes.call)
    anna.send_pull(wait_seconds=LONG)
    until_waiting(server)
    bert.stub.RestoreModel(pb.RestoreModelRequest(checkpoint=taken.checkpoint), timeout=TIMEOUT)
    assert anna.pulls.reason() is ErrorCode.STALE_GENERATION


def test_a_push_that_is_sent_again_while_it_waits_is_applied_once(start):
    server, made, anna, bert = two(start, Lead)
    anna.send_push(2, wait_seconds=LONG)
    until_waiting(server)
    again = Stream(anna.stub.PushSparse)
    again.send(*push_of(anna, 2, base=anna.version, wait_seconds=LONG))
    until_waiting(server, 2)
    made.meet(anna, bert)
    answers = [next(stream.call) for stream in (anna.pushes, again)]
    assert [answer.version for answer in answers] == [3, 3]
    assert sorted(answer.repeated_push for answer in answers) == [False, True]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_push_in_any_number_of_messages_waits_at_its_header(start, cut):
    server, made, anna, bert = two(start, Lead)
    anna.pushes.send(*push_of(anna, 2, base=anna.version, cut=cut, wait_seconds=LONG))
    until_waiting(server)
    made.meet(anna, bert)
    made.answered(next(anna.pushes.call))


def test_a_push_whose_repeat_was_applied_while_it_came_is_a_repeat(start):
    server, _, anna, bert = two(start, Lead)
    bert.send_push(1)
    next(bert.pushes.call)
    first, *others = push_of(anna, 2, base=anna.version, cut=2, wait_seconds=LONG)
    anna.pushes.send(first)
    wait_until(lambda: any(opened.call.received_bytes for opened in server._dispatcher.open_calls))
    again = Stream(anna.stub.PushSparse)
    again.send(*push_of(anna, 2, base=anna.version))
    assert next(again.call).version == 3
    anna.pushes.send(*others)
    assert next(anna.pushes.call).repeated_push


def test_a_round_that_the_clock_closes_is_answered_then(start):
    server = start()
    by_clock = {"rounds": json.dumps({"quorum": 0, "seconds": 0.2, "start_workers": 1})}
    anna, _ = (Worker(server.address, name, by_clock).join() for name in ("anna", "bert"))
    anna.send_push(1)
    next(anna.pushes.call)
    anna.send_pull(wait_seconds=LONG)
    assert next(anna.pulls.call).header.version == 1


def test_the_end_of_a_lease_closes_the_round_that_waited_for_it(start):
    server, made, anna, bert = two(start, Round)
    stream = made.call(anna, wait_seconds=LONG)
    until_waiting(server)
    bert.stub.Leave(pb.LeaveRequest(identity=bert.identity), timeout=TIMEOUT)
    made.answered(next(stream.call))


def test_a_renewal_waits_for_the_end_of_an_upload(start):
    server = start()
    anna, bert = RawWorker(server.address, "anna", N), RawWorker(server.address, "bert", N)
    uploading, go_on = threading.Event(), threading.Event()
    upload, anna.upload = anna.upload, lambda: (uploading.set(), go_on.wait(TIMEOUT), upload())
    joining = threading.Thread(target=anna.join)
    joining.start()
    assert uploading.wait(TIMEOUT)
    bert.join()
    request = pb.RenewLeaseRequest(identity=bert.identity, wait_seconds=0.05)
    assert bert.stub.RenewLease(request, timeout=TIMEOUT).upload.worker_id == "anna"
    request.wait_seconds = LONG
    renewal = bert.stub.RenewLease.future(request, timeout=TIMEOUT)
    until_waiting(server)
    go_on.set()
    assert not renewal.result().HasField("upload")
    joining.join(TIMEOUT)


def test_a_join_waits_for_the_end_of_the_lease_that_has_its_name(start):
    server = start()
    anna = Worker(server.address, "anna").join()
    again = RawWorker(server.address, "anna", N)
    for seconds in (0.0, 0.05):
        with pytest.raises(grpc.RpcError) as refused:
            again.stub.Join(again.join_request(wait_seconds=seconds), timeout=TIMEOUT)
        assert details_of(refused.value).reason is ErrorCode.WORKER_ALIVE
    joining = again.stub.Join.future(again.join_request(wait_seconds=LONG), timeout=TIMEOUT)
    until_waiting(server)
    anna.stub.Leave(pb.LeaveRequest(identity=anna.identity), timeout=TIMEOUT)
    assert joining.result().live_workers == 1
    assert waiting(server) == 0


def test_a_join_waits_until_a_lease_that_nobody_renews_is_over(start):
    server = start(lease_seconds=0.5)
    Worker(server.address, "anna").join()
    again = RawWorker(server.address, "anna", N)
    assert again.stub.Join(again.join_request(wait_seconds=LONG), timeout=TIMEOUT).live_workers == 1


def test_joins_that_wait_hold_no_memory_that_renewals_need(start, monkeypatch):
    server = start()
    anna = Worker(server.address, "anna").join()
    monkeypatch.setattr(server._dispatcher._join_budget, "most", 1)
    again = [RawWorker(server.address, "anna", N) for _ in range(2)]
    joining = again[0].stub.Join.future(again[0].join_request(wait_seconds=LONG), timeout=TIMEOUT)
    until_waiting(server)
    with pytest.raises(grpc.RpcError) as refused:
        again[1].stub.Join(again[1].join_request(wait_seconds=LONG), timeout=TIMEOUT)
    assert details_of(refused.value).reason is ErrorCode.BUSY
    assert anna.stub.RenewLease(pb.RenewLeaseRequest(identity=anna.identity), timeout=TIMEOUT).live_workers == 1
    joining.cancel()


def test_a_join_waits_for_the_model_that_another_worker_brings(start):
    server = start()
    anna, bert = RawWorker(server.address, "anna", N), RawWorker(server.address, "bert", N)
    granted = anna.stub.Join(anna.join_request(wait_seconds=LONG), timeout=TIMEOUT)
    anna.identity.run_id, anna.generation = granted.run_id, granted.generation
    for seconds in (0.0, 0.05):
        answer = bert.stub.Join(bert.join_request(wait_seconds=seconds), timeout=TIMEOUT)
        assert (answer.state, answer.upload.worker_id) == (pb.JOIN_STATE_WAIT, "anna")
    joining = bert.stub.Join.future(bert.join_request(wait_seconds=LONG), timeout=TIMEOUT)
    until_waiting(server)
    anna.upload()
    assert (joining.result().state, joining.result().generation) == (pb.JOIN_STATE_READY, anna.generation)


def test_a_join_waits_for_a_newer_model_than_the_one_that_is_here(start):
    first = start(num_shards=2)
    server = start(shard_index=1, num_shards=2, coordinator=first.address)
    anna, bert = RawWorker(server.address, "anna", N), RawWorker(server.address, "bert", N)
    place = {"shard_index": 1, "num_shards": 2}
    assert anna.join(**place).state == pb.JOIN_STATE_WAIT
    anna.identity.run_id, anna.generation = first.shard.run.run_id, 1 << 32
    send_half(anna)
    newer = bert.join_request(**place, generation_seen=2 << 32, wait_seconds=LONG)
    joining = bert.stub.Join.future(newer, timeout=TIMEOUT)
    until_waiting(server)
    assert bert.join(**place, generation_seen=1 << 32, wait_seconds=LONG).state == pb.JOIN_STATE_READY
    anna.generation = 2 << 32
    send_half(anna)
    assert joining.result().generation == anna.generation


def test_who_is_to_upload_and_leaves_makes_way_for_one_who_waits(start):
    server = start()
    anna, bert = RawWorker(server.address, "anna", N), RawWorker(server.address, "bert", N)
    anna.stub.Join(anna.join_request(), timeout=TIMEOUT)
    joining = bert.stub.Join.future(bert.join_request(wait_seconds=LONG), timeout=TIMEOUT)
    until_waiting(server)
    anna.stub.Leave(pb.LeaveRequest(identity=anna.identity), timeout=TIMEOUT)
    assert joining.result().state == pb.JOIN_STATE_UPLOAD


def send_half(worker):
    """Upload the second half of the model to the shard that has that."""
    header, half = pb.UploadHeader(identity=worker.identity, generation=worker.generation), N // 2
    chunk = dense_chunk(worker.theta[half:].tobytes(), half)
    parts = [{"header": header}, {"chunk": chunk}, {"commit": commit_of(chunk)}]
    worker.stub.UploadModel((pb.UploadModelRequest(**part) for part in parts), timeout=TIMEOUT)


def test_samples_that_others_hold_are_waited_for(start):
    server = start()
    anna, bert = (Worker(server.address, name).join() for name in ("anna", "bert"))

    def request(worker, seconds, held=()):
        return pb.LeaseSamplesRequest(
            identity=worker.identity,
            dataset="train",
            size=4,
            samples=8,
            has_epoch=True,
            wait_seconds=seconds,
            held=held,
        )

    held = []
    while granted := anna.stub.LeaseSamples(request(anna, 0.0, held), timeout=TIMEOUT).granted:
        held += granted
    answer = bert.stub.LeaseSamples(request(bert, 0.05), timeout=TIMEOUT)
    assert (list(answer.granted), answer.samples_elsewhere) == ([], 4)
    waits = bert.stub.LeaseSamples.future(request(bert, LONG), timeout=TIMEOUT)
    until_waiting(server)
    anna.stub.Leave(pb.LeaveRequest(identity=anna.identity), timeout=TIMEOUT)
    assert waits.result().granted
