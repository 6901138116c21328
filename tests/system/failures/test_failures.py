"""Nothing hangs and nothing is lost or doubled when a worker or a server goes away."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import psclient
from psclient.errors import ServerUnreachableError
from psclient.rpc.local_server import LocalServer
from psclient.settings import ClientSettings
from tests.system.operating.asking import status, worker_ids
from tests.system.tools import (
    QUICK,
    assert_same_parameters,
    go_on,
    make_data,
    make_model,
    run_of,
    stop,
    train_step,
    wait_until,
)

WORKER = """
import sys, torch, psclient
from tests.system.tools import QUICK, make_data, make_model, train_step
server, name = sys.argv[1:3]
model = make_model(batch_norm=False)
optimizer = psclient.GradientDropping(
    model.parameters(), lr=0.05, density=0.05, model=model, server=server, worker=name, settings=QUICK)
while True:
    train_step(model, optimizer, *make_data())
    print(optimizer.version, flush=True)
"""


def start_worker(server: LocalServer, name: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, server.server, name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    assert process.stdout.readline().strip(), process.stderr.read()
    return process


def drop(model, server, **options):
    options = {"settings": QUICK, "worker": "w"} | options
    return psclient.GradientDropping(model.parameters(), lr=0.05, density=0.05, model=model, server=server, **options)


def test_a_killed_worker_is_noticed_within_its_lease_and_the_others_go_on():
    with LocalServer(lease_seconds=1.5, down_mode="topk") as server:
        victim = start_worker(server, "victim")
        model = make_model(batch_norm=False)
        optimizer = drop(model, server, worker="survivor")
        assert set(worker_ids(server)) == {"victim", "survivor"}
        victim.send_signal(signal.SIGKILL)
        victim.wait(30)
        killed = time.monotonic()
        wait_until(lambda: worker_ids(server) == ["survivor"])
        assert time.monotonic() - killed < 25  # lease 1.5 s, plus what a loaded machine may take
        before = optimizer.version
        train_step(model, optimizer, *make_data())
        assert optimizer.version > before
        again = start_worker(server, "victim")  # a new incarnation takes the name
        again.kill()
        again.wait(30)


def test_a_late_joiner_starts_from_the_servers_model():
    with LocalServer(down_mode="exact") as server:
        early = make_model(0)
        a = drop(early, server, worker="early")
        for _ in range(10):
            train_step(early, a, *make_data())
        late = make_model(1)
        b = drop(late, server, worker="late")
        assert b.version == 10
        assert_same_parameters(late, server.server)
        train_step(late, b, *make_data())
        assert b.version == 11


def test_a_dead_server_surfaces_within_the_patience():
    settings = ClientSettings(deadline_seconds=1, connect_seconds=30, patience_seconds=2, dense_below=0)
    with LocalServer() as server:
        model = make_model()
        optimizer = drop(model, server, settings=settings)
        train_step(model, optimizer, *make_data())
        server.processes[0].kill()
        started = time.monotonic()
        with pytest.raises(ServerUnreachableError) as caught:
            train_step(model, optimizer, *make_data())
        assert caught.value.address == server.addresses[0]
        assert time.monotonic() - started < 20
        optimizer.close()


def test_a_server_that_never_was_there_is_named():
    settings = ClientSettings(connect_seconds=1.5)
    with pytest.raises(ServerUnreachableError, match=r"127\.0\.0\.1:9 .*psservice serve"):
        drop(make_model(), "127.0.0.1:9", settings=settings)


def test_a_stopped_server_surfaces_and_nothing_is_lost_or_doubled_when_it_continues():
    with LocalServer(down_mode="exact", lease_seconds=60) as server:
        model = make_model(batch_norm=False)
        optimizer = drop(model, server, settings=QUICK)
        train_step(model, optimizer, *make_data())
        stop(server, optimizer)
        with pytest.raises(ServerUnreachableError):
            train_step(model, optimizer, *make_data())
        go_on(server, optimizer)
        train_step(model, optimizer, *make_data())
        assert optimizer.version == 3  # the push in doubt was applied once, then the new one
        assert_same_parameters(model, server.server)


def test_conservation_through_kills_of_the_server():
    """Sum of lr·g = what the server's model moved + what the worker still holds, although a push was in doubt."""
    with LocalServer(down_mode="exact", lease_seconds=60) as server:
        w = torch.nn.Parameter(torch.zeros(1000))
        optimizer = psclient.GradientDropping([w], lr=1.0, density=0.01, server=server, worker="w", settings=QUICK)
        total = torch.zeros(1000)
        for step in range(8):
            w.grad = torch.randn(1000)
            total += w.grad
            if step == 4:
                stop(server, optimizer)
                with pytest.raises(ServerUnreachableError):
                    optimizer.step()
                go_on(server, optimizer)
            else:
                optimizer.step()
        residual = optimizer.state[w]["residual"]
        torch.testing.assert_close(total, residual - w.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_restarted_empty_server_gets_the_model_back_from_a_worker(shards):
    with LocalServer(shards=shards, down_mode="exact") as server:
        model = make_model(batch_norm=False)
        optimizer = drop(model, server)
        for _ in range(5):
            train_step(model, optimizer, *make_data())
        trained = [parameter.detach().clone() for parameter in model.parameters()]
        server.processes[0].kill()
        server.restart(0)
        train_step(model, optimizer, *make_data())
        assert_same_parameters(model, server.server)
        assert optimizer.version >= 5  # it goes on counting
        moved = max((p - t).abs().max().item() for p, t in zip(model.parameters(), trained, strict=True))
        assert moved < 0.5  # it went on from what was trained, not from fresh random values
        train_step(model, optimizer, *make_data())
        assert_same_parameters(model, server.server)


def test_one_restarted_shard_is_filled_again_from_a_replica():
    with LocalServer(shards=2, down_mode="exact") as server:
        models = [make_model(i, batch_norm=False) for i in range(2)]
        optimizers = [drop(m, server, worker=f"w{i}") for i, m in enumerate(models)]
        for step in range(6):
            train_step(models[step % 2], optimizers[step % 2], *make_data())
        server.processes[1].kill()
        server.restart(1)
        for step in range(4):
            train_step(models[step % 2], optimizers[step % 2], *make_data())
        assert_same_parameters(models[1], server.server)


def test_a_lost_lease_is_had_again_without_a_word():
    with LocalServer(lease_seconds=0.5, down_mode="exact") as server:
        model = make_model(batch_norm=False)
        optimizer = drop(model, server)
        train_step(model, optimizer, *make_data())
        run_of(optimizer).leases.stop()  # no renewal any more
        wait_until(lambda: not status(server).workers)
        train_step(model, optimizer, *make_data())
        assert optimizer.version == 2
        assert_same_parameters(model, server.server)


def test_a_lost_lease_in_topk_mode_costs_one_full_reply():
    with LocalServer(lease_seconds=0.5, down_mode="topk", down_density=0.05, down_dense_below=0) as server:
        model = make_model(batch_norm=False)
        optimizer = drop(model, server)

        def step():
            train_step(model, optimizer, *make_data())
            return optimizer.report.reply_mode

        wait_until(lambda: step() == "topk")  # on a machine with other load a lease may end between two steps
        run_of(optimizer).leases.stop()
        wait_until(lambda: not status(server).workers)
        assert step() == "exact"
        assert_same_parameters(model, server.server)
        wait_until(lambda: step() == "topk")


def test_sigterm_flushes_what_the_worker_holds():
    with LocalServer(lease_seconds=60) as server:
        process = start_worker(server, "leaver")
        for _ in range(5):
            process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
        assert "has pushed what it held" in err
        assert not status(server).workers
        last = status(server)
        assert last.version > 5


def test_flush_pushes_everything_held():
    with LocalServer(down_mode="exact") as server:
        w = torch.nn.Parameter(torch.zeros(500))
        optimizer = psclient.GradientDropping([w], lr=1.0, density=0.01, server=server, settings=QUICK)
        w.grad = torch.randn(500)
        optimizer.step()
        optimizer.flush()
        assert optimizer.report.version == 2
        assert not optimizer.state[w]["residual"].any()
        torch.testing.assert_close(psclient.download(server.server)["parameter_0"], -w.grad)


def test_the_server_finishes_what_it_has_and_ends_with_status_0_on_sigterm():
    server = LocalServer()
    model = make_model()
    optimizer = drop(model, server)
    train_step(model, optimizer, *make_data())
    server.processes[0].send_signal(signal.SIGTERM)
    assert server.processes[0].wait(40) == 0
    optimizer._hurry(0.5)
    optimizer.close()


def test_a_state_saved_in_doubt_holds_the_payload():
    settings = ClientSettings(deadline_seconds=1, connect_seconds=30, patience_seconds=1, dense_below=0)
    with LocalServer(down_mode="exact", lease_seconds=60) as server:
        w = torch.nn.Parameter(torch.zeros(100))
        optimizer = psclient.GradientDropping([w], lr=1.0, density=0.1, server=server, settings=settings)
        server.processes[0].kill()
        w.grad = torch.randn(100)
        with pytest.raises(ServerUnreachableError):
            optimizer.step()
        sent = (optimizer.state[w]["residual"] == 0).sum()
        assert 9 <= sent <= 11
        assert torch.equal(optimizer.state_dict()["state"][0]["residual"], w.grad)
        assert (optimizer.state[w]["residual"] == 0).sum() == sent
        optimizer._hurry(0.1)
        optimizer.close()


def test_a_model_smaller_than_the_number_of_shards_is_refused():
    with LocalServer(shards=2) as server, pytest.raises(psclient.errors.RefusedError, match="cannot be cut"):
        psclient.ASGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, server=server, settings=QUICK)


def test_closing_leaves_no_thread_behind():
    with LocalServer() as server:
        before = set(threading.enumerate())
        model = make_model()
        optimizer = drop(model, server)
        train_step(model, optimizer, *make_data())
        optimizer.close()
        new = {thread for thread in threading.enumerate() if thread not in before}
        assert {thread.name for thread in new if thread.name.startswith("psclient")} <= {"psclient-watch"}
        wait_until(lambda: not any(thread.is_alive() for thread in new if thread.name.startswith("psclient")))


def test_totals_hold_every_byte_of_the_upload_and_the_last_exchange():
    with LocalServer(buffer_period_steps=100) as server:
        model = make_model()
        optimizer = drop(model, server)
        assert optimizer.totals.upload_bytes > 4 * sum(p.numel() for p in model.parameters())
        before = optimizer.totals.buffer_bytes
        train_step(model, optimizer, *make_data())
        optimizer.close()
        assert optimizer.totals.buffer_bytes > before


def test_pull_brings_the_others_work_without_a_push():
    with LocalServer(down_mode="exact") as server:
        models = [make_model(i, batch_norm=False) for i in range(2)]
        a, b = (drop(m, server, worker=f"w{i}") for i, m in enumerate(models))
        train_step(models[0], a, *make_data())
        b.pull()
        assert b.version == 1
        assert_same_parameters(models[1], server.server)


def test_sigterm_in_a_step_with_a_dead_server_ends_within_the_grace_period():
    with LocalServer(lease_seconds=60) as server:
        process = start_worker(server, "leaver")
        server.processes[0].kill()
        lines = iter(process.stderr.readline, "")
        assert any("does not answer" in line for line in lines)  # it is inside a step, waiting
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM


FORKING = """
import gc, os, sys, psclient
from tests.system.operating.asking import worker_ids
from tests.system.tools import QUICK, make_data, make_model, train_step
model = make_model(batch_norm=False)
optimizer = psclient.DGS(model.parameters(), lr=0.1, model=model, server=sys.argv[1], worker="w", settings=QUICK)
child = os.fork()
if child == 0:
    if sys.argv[2] == "closes":
        optimizer.close()
    del optimizer
    gc.collect()
    os._exit(0)
os.waitpid(child, 0)
print(worker_ids(sys.argv[1]))
train_step(model, optimizer, *make_data())
print(optimizer.version)
optimizer.close()
"""


@pytest.mark.parametrize("child", ["closes", "forgets"])
def test_a_forked_child_does_not_end_its_parents_membership(child):
    """In a process of its own: this one has gRPC servers of other tests, which a fork does not survive."""
    with LocalServer(lease_seconds=60) as server:
        command = [sys.executable, "-c", FORKING, server.server, child]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert answer.stdout.split("\n")[:2] == ["['w']", "1"], answer.stderr
    assert answer.returncode == 0
