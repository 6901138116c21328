"""Staleness is what others have done meanwhile: a worker's own pushes make it no staler, before and after a restart."""

import pytest

from psclient.rpc.local_server import LocalServer
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.system.raw import TIMEOUT, joined, refusal


def test_a_lone_worker_that_does_not_pull_meets_no_cut_off():
    with LocalServer(max_staleness=1) as server:
        worker = joined(server.addresses[0])
        answers = [worker.push([step], [1.0]) for step in range(5)]
        assert [(answer.version, answer.staleness) for answer in answers] == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0)]


def test_the_cut_off_counts_the_pushes_of_others_between():
    with LocalServer(max_staleness=1) as server:
        one, other = joined(server.addresses[0]), joined(server.addresses[0])
        assert one.push([1], [1.0]).staleness == 0
        assert other.push([1], [1.0]).staleness == 1
        assert one.push([1], [1.0]).staleness == 1
        assert refusal(lambda: other.push([1], [1.0])) == ("ABORTED", "TOO_STALE")  # two of one's
        other.pull()
        assert other.push([1], [1.0]).staleness == 0
        assert refusal(lambda: one.push([1], [1.0])) == ("ABORTED", "TOO_STALE")


@pytest.mark.parametrize("snapshot", [False, True], ids=["journal", "snapshot"])
def test_a_server_that_was_killed_counts_on(tmp_path, snapshot):
    with LocalServer(data_dir=tmp_path, run_id="r", lease_seconds=300) as server:
        one, other = joined(server.addresses[0]), joined(server.addresses[0])
        one.push([1], [1.0])
        assert other.push([1], [1.0]).staleness == 1
        one.push([1], [1.0])
        if snapshot:
            one.stub.TakeSnapshot(pb.TakeSnapshotRequest(), timeout=TIMEOUT)
        one.push([1], [1.0])
        server.processes[0].kill()
        server.restart()
        one.stub.GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT, wait_for_ready=True)
        answer = one.push([1], [1.0])
        assert (answer.version, answer.staleness) == (5, 1)
        answer = other.push([1], [1.0])
        assert (answer.version, answer.staleness) == (6, 4)


def test_a_worker_that_had_no_lease_at_a_snapshot_is_no_staler_when_it_comes_back(tmp_path):
    with LocalServer(data_dir=tmp_path, run_id="r", lease_seconds=300) as server:
        worker = joined(server.addresses[0])
        for step in range(4):
            worker.push([step], [1.0])
        worker.stub.Leave(pb.LeaveRequest(identity=worker.identity), timeout=TIMEOUT)
        worker.stub.TakeSnapshot(pb.TakeSnapshotRequest(), timeout=TIMEOUT)
        server.processes[0].kill()
        server.restart()
        worker.stub.GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT, wait_for_ready=True)
        worker.join()
        answer = worker.push([1], [1.0])
        assert (answer.version, answer.staleness) == (5, 0)
