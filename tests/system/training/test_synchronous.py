"""Synchronous training through real servers: what large-batch SGD does, and what a slow or dead worker means."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import psclient
from psclient.errors import ConfigurationError, HeldBackError, SettingsMismatchError
from tests.system.operating.asking import status
from tests.system.tools import (
    QUICK,
    assert_close,
    assert_same_parameters,
    at_once,
    engine_of,
    make_data,
    make_model,
    same,
    train_step,
    wait_until,
)
from tests.tiers import long_but

WORKERS, STEPS, SHARE = 4, 12, 16


def model():
    return make_model(batch_norm=False)


def share(worker, step):
    """A worker's part of the batch of a step."""
    x, y = make_data(seed=step, count=WORKERS * SHARE)
    return x[worker::WORKERS], y[worker::WORKERS]


def train(mine, server, worker, steps, make):
    with make(mine, server, f"worker-{worker}") as optimizer:
        for step in range(steps):
            train_step(mine, optimizer, *share(worker, step))
    return mine


EAGER = QUICK.model_copy(update={"bucket_bytes": 1})
"""Every tensor is a group of its own, so that with overlap most of a push is sent during backward."""

overlapping_too = pytest.mark.parametrize("overlap", [False, True], ids=["in-line", "overlap"])


def in_threads(server, make, workers=WORKERS, steps=STEPS):
    models = [model() for _ in range(workers)]  # here: threads would draw from one generator at the same time
    return at_once(lambda worker: train(models[worker], server, worker, steps, make), range(workers))


def ssgd(rounds=None, **options):
    settings = {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01, "settings": QUICK} | options
    rounds = rounds or psclient.Rounds(start_workers=WORKERS)

    def make(mine, server, worker):
        return psclient.SSGD(mine.parameters(), model=mine, server=server, worker=worker, rounds=rounds, **settings)

    return make


def large_batches(steps=STEPS):
    one = model()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
    for step in range(steps):
        train_step(one, optimizer, *make_data(seed=step, count=WORKERS * SHARE))
    return one


def ddp_worker(rank, store, found):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    parallel = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
    for step in range(STEPS):
        x, y = make_data(seed=step, count=WORKERS * SHARE)
        train_step(parallel, optimizer, x[rank::2], y[rank::2])
    if rank == 0:
        torch.save(parallel.module.state_dict(), found)
    dist.barrier()  # neither leaves while the other still talks to it
    os._exit(0)  # gloo's threads abort the odd interpreter that ends in order, which is not what is tested


@pytest.mark.parametrize("shards", long_but([2], [1, 2]))
def test_it_is_sgd_on_the_batches_of_all_workers_together(shards):
    expected = large_batches()
    with psclient.LocalServer(shards=shards) as server:
        replicas = in_threads(server.server, ssgd())
        for replica in replicas:
            assert_same_parameters(replica, server.server)
            assert_close(replica, expected)


def test_it_is_what_distributed_data_parallel_does(tmp_path):
    store, found = tmp_path / "store", tmp_path / "model.pt"
    processes = mp.start_processes(ddp_worker, (str(store), str(found)), nprocs=2, join=False, start_method="spawn")
    with psclient.LocalServer() as server:
        replica = in_threads(server.server, ssgd())[0]
    while not processes.join(timeout=60):
        pass
    theirs = torch.load(found, weights_only=True)
    for name, mine in replica.state_dict().items():
        torch.testing.assert_close(mine, theirs[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "overlap", [False, pytest.param(True, marks=pytest.mark.long)], ids=["in-line", "overlap"]
)  # what a push during backward leads to is the next test's
@pytest.mark.parametrize("kind", long_but(["ssgd", "dgs"], ["ssgd", "dgs", "dgc", "gradient_dropping", "asgd"]))
def test_every_method_trains_in_rounds_dense_or_sparse(kind, overlap):
    methods = {
        "ssgd": lambda m, **c: psclient.SSGD(m.parameters(), lr=0.1, density=0.1, **c),
        "dgs": lambda m, **c: psclient.DGS(m.parameters(), lr=0.1, density=0.1, **c),
        "dgc": lambda m, **c: psclient.DGC(m.parameters(), lr=0.3, momentum=0.5, density=0.1, **c),
        "gradient_dropping": lambda m, **c: psclient.GradientDropping(m.parameters(), lr=0.2, density=0.1, **c),
        "asgd": lambda m, **c: psclient.ASGD(m.parameters(), lr=0.2, **c),
    }

    def make(mine, server, worker):
        rounds = psclient.Rounds(start_workers=2)
        return methods[kind](
            mine, model=mine, server=server, worker=worker, rounds=rounds, overlap=overlap, settings=EAGER
        )

    def loss_of(one):
        x, y = make_data(seed=77)
        with torch.no_grad():
            return nn.functional.cross_entropy(one(x), y).item()

    with psclient.LocalServer(down_mode="exact") as server:
        replicas = in_threads(server.server, make, workers=2, steps=40)
        assert_same_parameters(replicas[0], server.server)
    assert loss_of(replicas[0]) < 0.7 * loss_of(model())


@pytest.mark.parametrize("shards", long_but([1], [1, 2]))
@pytest.mark.parametrize(
    "method",
    [
        lambda m, **c: psclient.SSGD(m.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01, **c),
        lambda m, **c: psclient.DGS(m.parameters(), lr=0.1, density=0.1, **c),
        pytest.param(
            lambda m, **c: psclient.ServerOptimizer(m.parameters(), "Adam", {"lr": 0.01}, density=0.1, **c),
            marks=pytest.mark.long,
        ),
    ],
    ids=["dense", "sparse", "adam"],
)
def test_a_push_during_backward_leads_to_the_same_bits_as_one_after_it(method, shards):
    replicas = []
    for overlap in (False, True):

        def make(mine, server, worker, overlap=overlap):
            rounds = psclient.Rounds(start_workers=2)
            settings = EAGER.model_copy(update={"selector": "exact"})
            optimizer = method(
                mine, model=mine, server=server, worker=worker, rounds=rounds, overlap=overlap, settings=settings
            )
            step = optimizer.step

            def checked():
                step()
                assert optimizer.version == optimizer.report.version == optimizer.report.step
                assert optimizer.report.staleness == optimizer.report.refused == 0

            optimizer.step = checked
            return optimizer

        with psclient.LocalServer(shards=shards, down_mode="exact") as server:
            found = in_threads(server.server, make, workers=2, steps=20)
            for replica in found:
                assert_same_parameters(replica, server.server)
            replicas.append(found[0])
    assert same(*replicas)


@overlapping_too
def test_with_a_backup_worker_the_fast_ones_do_not_wait_and_the_late_update_is_kept(overlap):
    with psclient.LocalServer() as server:
        slow, fast = model(), model()
        make = ssgd(psclient.Rounds(quorum=1), momentum=0.0, weight_decay=0.0, overlap=overlap, settings=EAGER)
        with make(slow, server.server, "slow") as behind, make(fast, server.server, "fast") as ahead:
            loss = nn.functional.cross_entropy(slow(share(0, 0)[0]), share(0, 0)[1])
            loss.backward()
            for step in range(5):
                train_step(fast, ahead, *share(1, step))
            assert ahead.version == 5
            before = [parameter.detach().clone() for parameter in slow.parameters()]
            behind.step()
            assert behind.report.refused == 1
            assert behind.version == 5, "it has caught up"
            held = [behind.state[parameter]["residual"] for parameter in slow.parameters()]
            for residual, parameter in zip(held, slow.parameters(), strict=True):
                torch.testing.assert_close(residual, parameter.grad.reshape(-1))  # lr·g, divided by lr again
            assert any(not torch.equal(b, p) for b, p in zip(before, slow.parameters(), strict=True))
            at_five = [parameter.detach().clone() for parameter in slow.parameters()]
            gradients = [parameter.grad.clone() for parameter in slow.parameters()]
            train_step(slow, behind, *share(0, 1))
            assert behind.version == 6
            for was, late, parameter in zip(at_five, gradients, slow.parameters(), strict=True):
                torch.testing.assert_close(parameter, was - 0.2 * (late + parameter.grad), rtol=1e-4, atol=1e-6)


def a_worker_until_told(server, steps_before_stop, told, overlap):
    torch.set_num_threads(1)
    mine = model()
    make = ssgd(psclient.Rounds(start_workers=2), overlap=overlap, settings=EAGER)
    with make(mine, server, "mortal") as optimizer:
        for step in range(1000):
            if overlap and step == steps_before_stop:  # half of this step's push is sent, and nobody commits it
                nn.functional.cross_entropy(mine(share(1, step)[0]), share(1, step)[1]).backward()
                wait_until(lambda: engine_of(optimizer).number == steps_before_stop + 1)
                told.set()
                time.sleep(100)
            train_step(mine, optimizer, *share(1, step))
            if step + 1 == steps_before_stop and not overlap:
                told.set()


@overlapping_too
def test_a_killed_worker_holds_the_round_up_for_its_lease_and_no_longer(overlap):
    context = mp.get_context("spawn")
    told = context.Event()
    patient = EAGER.model_copy(update={"patience_seconds": 90.0})  # the other's process has to start
    with psclient.LocalServer(lease_seconds=1.0) as server:
        other = context.Process(target=a_worker_until_told, args=(server.server, 3, told, overlap), daemon=True)
        other.start()

        def kill_it():  # in a thread: the survivor waits for it in a step
            told.wait(90)
            os.kill(other.pid, signal.SIGKILL)
            other.join()

        threading.Thread(target=kill_it, daemon=True).start()
        deadline = time.monotonic() + 110
        mine = model()
        with ssgd(psclient.Rounds(start_workers=2), settings=patient)(mine, server.server, "survivor") as optimizer:
            alone = 0
            while alone < 5:
                assert time.monotonic() < deadline
                train_step(mine, optimizer, *share(0, optimizer.report.step))
                alone += not other.is_alive()
            assert optimizer.live_workers == 1
            assert_same_parameters(mine, server.server)


def test_whoever_waits_too_long_for_the_others_is_told_for_whom():
    impatient = QUICK.model_copy(update={"patience_seconds": 0.5})
    with psclient.LocalServer() as server:
        mine, other = model(), model()
        with (
            ssgd()(other, server.server, "other"),
            ssgd(settings=impatient)(mine, server.server, "me") as me,
            pytest.raises(HeldBackError, match="waited"),
        ):
            train_step(mine, me, *share(0, 0))


def test_workers_must_agree_on_their_rounds():
    with psclient.LocalServer() as server:
        one, two = model(), model()
        with ssgd(psclient.Rounds(quorum=2))(one, server.server, "one"):
            with pytest.raises(SettingsMismatchError, match="rounds"):
                ssgd(psclient.Rounds(quorum=3))(two, server.server, "two")
            with pytest.raises(SettingsMismatchError):
                psclient.DGS(two.parameters(), lr=0.1, model=two, server=server, worker="three", settings=QUICK)


@pytest.mark.parametrize("wrong", [{"quorum": -1}, {"seconds": -1.0}, {"seconds": float("inf")}, {"start_workers": 0}])
def test_rounds_out_of_their_range_are_refused_at_once(wrong):
    with pytest.raises(ConfigurationError):
        psclient.Rounds(**wrong)


@overlapping_too
def test_a_killed_server_comes_back_with_the_open_round(tmp_path, overlap):
    with psclient.LocalServer(data_dir=tmp_path, lease_seconds=30) as server:
        one, two = model(), model()
        make = ssgd(psclient.Rounds(start_workers=2), overlap=overlap, settings=EAGER)
        with make(one, server.server, "one") as first, make(two, server.server, "two") as second:
            waiting = threading.Thread(target=train_step, args=(one, first, *share(0, 0)), daemon=True)
            waiting.start()
            wait_until(lambda: status(server).workers[0].pushes == 1)
            nn.functional.cross_entropy(two(share(1, 0)[0]), share(1, 0)[1]).backward()  # with overlap: is being sent
            server.processes[0].kill()
            server.restart()
            second.step()
            waiting.join(30)
            assert not waiting.is_alive()
            assert_same_parameters(one, server.server)
            assert_same_parameters(two, server.server)
            assert first.version == second.version == 1
            expected = model()
            optimizer = torch.optim.SGD(expected.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
            train_step(expected, optimizer, *(torch.cat(parts) for parts in zip(share(0, 0), share(1, 0), strict=True)))
            assert_close(one, expected)
