"""Admission with real processes: workers that are held back, pushes that are too stale, updates that are too large."""

import os
import signal
import subprocess
import sys
import threading

import grpc
import pytest
import torch

import psclient
from psclient.errors import HeldBackError, from_rpc_error
from psclient.rpc.local_server import LocalServer
from psclient.settings import ClientSettings
from pscore.wire.errors import ErrorCode
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.system.operating.asking import metrics, status
from tests.system.raw import RawWorker
from tests.system.tools import QUICK, assert_same_parameters, make_data, make_model, suspend, train_step, wait_until
from tests.tiers import long_but

HASTY = ClientSettings(deadline_seconds=5, connect_seconds=30, patience_seconds=0.5, dense_below=0)

WORKER = """
import sys, torch, psclient
from tests.system.tools import QUICK, make_data, make_model, train_step
model = make_model(batch_norm=False)
optimizer = psclient.GradientDropping(
    model.parameters(), lr=0.05, density=0.05, model=model, server=sys.argv[1], worker=sys.argv[2],
    overlap=sys.argv[3] == "overlap", settings=QUICK)
print("joined", flush=True)
sys.stdin.readline()
while True:
    train_step(model, optimizer, *make_data())
"""


def start_worker(server, name, mode="plain"):
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, server.server, name, mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "joined\n"
    return process


def pushes(server):
    return {worker.worker_id: worker.pushes for worker in status(server).workers}


def metric(server, name):
    """The sum of a metric over its labels."""
    return sum(float(line.split()[-1]) for line in metrics(server).splitlines() if line.startswith(name))


def dropping(server, worker, settings=QUICK, size=200, **options):
    parameter = torch.nn.Parameter(torch.zeros(size))
    options = {"lr": 1.0, "density": 0.1, "server": server, "worker": worker, "settings": settings} | options
    return parameter, psclient.GradientDropping([parameter], **options)


def step(parameter, optimizer):
    parameter.grad = torch.randn(parameter.shape)
    optimizer.step()
    return parameter.grad


@pytest.mark.parametrize("mode", long_but(["plain"], ["plain", "overlap"]))
def test_a_worker_waits_for_one_that_is_stopped_and_goes_on_with_it(mode):
    bound = 4
    with LocalServer(ssp_bound=bound, lease_seconds=60, down_mode="exact") as server:
        workers = {name: start_worker(server, name, mode) for name in ("fast", "slow")}
        try:
            for process in workers.values():
                process.stdin.write("\n")
                process.stdin.flush()
            wait_until(lambda: min(pushes(server).values()) > 10)
            suspend(workers["slow"].pid)
            refused = metric(server, 'psservice_refusals_total{reason="TOO_FAR_AHEAD"')
            wait_until(lambda: metric(server, 'psservice_refusals_total{reason="TOO_FAR_AHEAD"') > refused + 2)
            held = pushes(server)
            assert abs(held["fast"] - held["slow"]) <= bound
            assert metric(server, "psservice_clock_spread") <= bound
            wait_until(lambda: metric(server, 'psservice_refusals_total{reason="TOO_FAR_AHEAD"') > refused + 4)
            assert pushes(server) == held
            os.kill(workers["slow"].pid, signal.SIGCONT)
            wait_until(lambda: pushes(server)["fast"] > held["fast"] + 10)
        finally:
            for process in workers.values():
                process.kill()
                process.communicate()


def test_a_worker_goes_on_when_the_lease_of_one_that_is_dead_ends():
    with LocalServer(ssp_bound=2, lease_seconds=1.5) as server:
        victim = start_worker(server, "victim")
        model = make_model(batch_norm=False)
        optimizer = psclient.GradientDropping(
            model.parameters(), lr=0.05, density=0.05, model=model, server=server, worker="w", settings=QUICK
        )
        victim.kill()
        victim.communicate()
        for _ in range(5):  # the third waits for the end of the lease
            train_step(model, optimizer, *make_data())
        assert optimizer.version == 5


def test_one_that_gives_up_says_for_whom_it_waited_and_loses_nothing():
    with LocalServer(ssp_bound=2, lease_seconds=60, down_mode="exact") as server:
        parameter, fast = dropping(server, "fast", HASTY)
        other, slow = dropping(server, "slow")
        total = sum(step(parameter, fast) for _ in range(2))
        with pytest.raises(HeldBackError, match=r"waited .* for slower workers .*'slow'.*--ssp-bound"):
            step(parameter, fast)
        total = total + parameter.grad
        with pytest.raises(HeldBackError):
            fast.pull()
        given = sum(step(other, slow) for _ in range(2))
        total = total + step(parameter, fast)  # completes the push that was held back, and makes its own
        fast.pull()
        assert fast.version == 6
        held = fast.state[parameter]["residual"] + slow.state[other]["residual"]
        torch.testing.assert_close(total + given, held - parameter.detach(), rtol=1e-5, atol=1e-5)


def test_who_is_held_back_is_told_at_the_header_and_a_repeat_is_answered_all_the_same():
    with LocalServer(ssp_bound=1, lease_seconds=60) as server:
        workers = [RawWorker(server.addresses[0], name) for name in ("fast", "slow")]
        for worker in workers:
            worker.join()
        fast = workers[0]
        first, done = fast.push([1], [1.0]), threading.Event()
        header = pb.PushHeader(identity=fast.identity, step=2, generation=fast.generation)

        def header_alone():
            yield pb.PushSparseRequest(header=header)
            done.wait(20)

        with pytest.raises(grpc.RpcError) as caught:
            next(fast.stub.PushSparse(header_alone(), timeout=20))
        done.set()
        failure = from_rpc_error(caught.value)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (failure.reason, 0 < failure.retry_seconds <= 1) == (ErrorCode.TOO_FAR_AHEAD, True)
        fast.step -= 1
        again = fast.push([1], [1.0])
        assert (again.version, again.repeated_push) == (first.version, True)


def test_clocks_survive_the_death_of_the_server(tmp_path):
    patient = HASTY.model_copy(update={"patience_seconds": 4.0})  # dialling anew takes a part of it
    with LocalServer(ssp_bound=2, lease_seconds=60, down_mode="exact", data_dir=tmp_path) as server:
        parameter, fast = dropping(server, "fast", patient)
        other, slow = dropping(server, "slow")
        for _ in range(2):
            step(parameter, fast)
        server.processes[0].kill()
        server.restart(0)
        slow.pull()  # the server is back
        with pytest.raises(HeldBackError):
            step(parameter, fast)
        step(other, slow)
        fast.pull()  # completes the push that was held back
        assert fast.version == 4


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_push_that_is_too_stale_goes_back_and_training_goes_on(shards, overlap):
    with LocalServer(shards=shards, max_staleness=3, down_mode="exact") as server:
        late, optimizer = dropping(server, "late", overlap=overlap)
        other, quick = dropping(server, "quick")
        given = sum(step(other, quick) for _ in range(5))

        def backward_and_step():
            gradient = torch.randn(late.shape)
            optimizer.zero_grad()
            (late * gradient).sum().backward()
            optimizer.step()
            return gradient

        total = sum(backward_and_step() for _ in range(4))
        optimizer.pull()
        refused = 2 if overlap else 1  # with overlap the next push is on its way by then, from the same base
        assert optimizer.totals.refused == refused * shards
        assert metric(server, 'psservice_refusals_total{reason="TOO_STALE"') == refused
        assert optimizer.version == 9 - refused
        held = optimizer.state[late]["residual"] + quick.state[other]["residual"]
        torch.testing.assert_close(total + given, held - late.detach(), rtol=1e-5, atol=1e-5)


def test_the_report_counts_a_push_that_was_too_stale():
    with LocalServer(max_staleness=1, down_mode="exact") as server:
        late, optimizer = dropping(server, "late")
        other, quick = dropping(server, "quick")
        for _ in range(3):
            step(other, quick)
        gradient = step(late, optimizer)
        assert (optimizer.report.refused, optimizer.version) == (1, 3)
        assert torch.equal(optimizer.state[late]["residual"], gradient)  # nothing of it has left
        step(late, optimizer)
        assert (optimizer.report.refused, optimizer.version) == (0, 4)


@pytest.mark.parametrize("shards", [1, 2])
def test_two_workers_within_a_bound_of_one_take_turns(shards):
    with LocalServer(shards=shards, ssp_bound=1, lease_seconds=60, down_mode="exact") as server:
        pairs = [dropping(server, f"w{i}") for i in range(2)]

        def train(parameter, optimizer):
            for _ in range(10):
                step(parameter, optimizer)

        threads = [threading.Thread(target=train, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert pushes(server) == {"w0": 10, "w1": 10}
        assert_pulled(pairs, server)


def assert_pulled(pairs, server):
    model = torch.nn.Module()
    for parameter, optimizer in pairs:
        optimizer.pull()
        model.parameter_0 = parameter
        assert_same_parameters(model, server.server)
