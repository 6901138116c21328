"""Leases of real servers whose disk, or who themselves, stand still for a while."""

import os
import signal
import time

import pytest

import psclient.rpc.local_server
from psclient.rpc.local_server import LocalServer
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.faults import spawner
from tests.system.raw import TIMEOUT, RawWorker
from tests.system.tools import suspend, wait_until

CROWD = 300
LEASE_SECONDS = 20.0


def crowd(server, count):
    """Workers that hold leases, all over one connection; the first has uploaded a model."""
    workers = [RawWorker(server.addresses[0], "w0")]
    workers[0].join()
    for number in range(1, count):
        worker = RawWorker.__new__(RawWorker)
        worker.__dict__.update(workers[0].__dict__)
        worker.identity = pb.WorkerIdentity(worker_id=f"w{number}", incarnation="1", run_id=workers[0].identity.run_id)
        workers.append(worker)
    answers(workers[0].stub.Join, [worker.join_request() for worker in workers[1:]])
    return workers


def renew(workers):
    return answers(workers[0].stub.RenewLease, [pb.RenewLeaseRequest(identity=worker.identity) for worker in workers])


def answers(method, requests):
    """Of many calls side by side: a crowd that takes turns is slower than its leases on a slow machine."""
    given = []
    for start in range(0, len(requests), 50):
        given += results([method.future(request, timeout=TIMEOUT) for request in requests[start : start + 50]])
    return given


def results(calls):
    return [call.result(TIMEOUT) for call in calls]


@pytest.mark.long
def test_leases_are_renewed_while_the_end_of_one_waits_for_the_disk(tmp_path, monkeypatch):
    slow = tmp_path / "slow"
    monkeypatch.setattr(psclient.rpc.local_server, "spawn", spawner("slow-journal", slow))
    with LocalServer(data_dir=tmp_path / "data", lease_seconds=LEASE_SECONDS) as server:
        late, *others = crowd(server, CROWD + 1)
        slow.touch()
        try:
            snapshot = late.stub.TakeSnapshot.future(pb.TakeSnapshotRequest(), timeout=120)
            end = time.monotonic() + 100
            while max(answer.live_workers for answer in renew(others)) > CROWD:
                assert time.monotonic() < end
                time.sleep(LEASE_SECONDS / 3)  # as workers renew
            assert not snapshot.done(), "the disk stands still all the time"
        finally:
            slow.unlink()
        snapshot.result(TIMEOUT)
        status = late.stub.GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT)
        assert late.identity.worker_id not in {worker.worker_id for worker in status.workers}


def stopped(server, seconds):
    """Stop the server's process for so long; the time must pass, for nothing is told of its end."""
    suspend(server.processes[0].pid)
    return time.monotonic() + seconds


def go_on(server, end):
    time.sleep(max(0.0, end - time.monotonic()))
    os.kill(server.processes[0].pid, signal.SIGCONT)


@pytest.mark.parametrize("when", ["waiting", "afterwards"])
def test_a_server_that_stood_still_for_longer_than_a_lease_ends_nobody_who_renews(when):
    lease = 2.0
    with LocalServer(lease_seconds=lease) as server:
        workers = crowd(server, 20)
        renew(workers)
        end = stopped(server, 2 * lease)
        if when == "waiting":
            calls = [
                worker.stub.RenewLease.future(pb.RenewLeaseRequest(identity=worker.identity), timeout=TIMEOUT)
                for worker in workers
            ]
            go_on(server, end)
            renewed = results(calls)
        else:
            go_on(server, end)
            renewed = renew(workers)
        assert [answer.live_workers for answer in renewed] == [20] * 20


def test_one_who_does_not_renew_is_taken_for_dead_after_the_server_stood_still():
    with LocalServer(lease_seconds=1.0) as server:
        alive, _dead = crowd(server, 2)
        go_on(server, stopped(server, 2.0))
        wait_until(lambda: renew([alive])[0].live_workers == 1)
