"""WAGMA-SGD with real servers and workers: it trains, waits for nobody but where it should, and survives deaths."""

import copy
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn

import psclient
from psclient.errors import HeldBackError
from psclient.rpc.local_server import LocalServer
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.ctl.client import call
from tests.system.operating.asking import status
from tests.system.tools import (
    QUICK,
    assert_close,
    assert_same_parameters,
    at_once,
    make_data,
    make_model,
    run_of,
    suspend,
    train_step,
    wait_until,
)

VICTIM = """
import sys, torch, psclient
from tests.system.tools import QUICK, make_data, make_model, train_step
server, tau = sys.argv[1:3]
model = make_model(batch_norm=False)
optimizer = psclient.WAGMA(
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), tau=int(tau),
    model=model, server=server, worker="victim", settings=QUICK)
while True:
    print(optimizer.report.step, flush=True)
    train_step(model, optimizer, *make_data())
"""
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
IMPATIENT = QUICK.model_copy(update={"patience_seconds": 1.5})


def start_victim(server, tau):
    process = subprocess.Popen(
        [sys.executable, "-c", VICTIM, server.server, str(tau)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout.readline().strip() == "0"  # it has joined
    return process


def last_step(server, name):
    return next(worker.last_step for worker in status(server).workers if worker.worker_id == name)


class Worker:
    """A worker of this process, with data of its own."""

    def __init__(self, server, number=0, inner=SGD, **options):
        options = {"settings": QUICK} | options
        self.model = make_model(number, batch_norm=False)
        self.data = make_data(number)
        self.optimizer = psclient.WAGMA(
            inner(self.model.parameters()), model=self.model, server=server, worker=f"w{number}", **options
        )

    def train(self, steps):
        for _ in range(steps):
            train_step(self.model, self.optimizer, *self.data)

    def until(self, step):
        while self.optimizer.report.step < step:  # the first has the number that the server says
            self.train(1)

    def accuracy(self):
        x, y = self.data
        return (self.model(x).argmax(1) == y).float().mean().item()

    def state(self):
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}


def together(workers, act):
    """Let workers act at the same time; return what each has raised, or ``None``."""

    def run(worker):
        try:
            act(worker)
        except Exception as error:
            return error

    return at_once(run, workers, 100)


def all_train(workers, steps):
    assert together(workers, lambda worker: worker.train(steps)) == [None] * len(workers)


def fleet(server, count, **options):
    return [Worker(server, number, **options) for number in range(count)]


def finish(server, workers):
    """End the run; everybody has the model then."""
    for address in server.addresses:
        call(address, "FinishRun", pb.FinishRunRequest(), 10.0)
    for worker in workers:
        worker.optimizer.pull()
        assert_same_parameters(worker.model, server.server)
        worker.optimizer.close()


@pytest.mark.parametrize(
    "options",
    [
        {"late": "paper", "shards": 2},
        pytest.param(
            {"density": 0.1, "down_mode": "topk", "inner": partial(SGD, nesterov=True)}, marks=pytest.mark.long
        ),
        pytest.param({"inner": partial(torch.optim.AdamW, lr=0.01), "tau": 5}, marks=pytest.mark.long),
    ],
    ids=lambda options: "-".join(options),
)
def test_four_workers_learn_the_task_together(options):
    options = dict(options)
    settings = {key: options.pop(key) for key in ("shards", "down_mode") if key in options}
    with LocalServer(**settings) as server:
        workers = fleet(server, 4, **{"tau": 3} | options)
        all_train(workers, 48)
        assert {worker.optimizer.report.step for worker in workers} == {48}
        if "shards" in settings:  # answered exactly, and the last step was a global one
            for name, value in workers[0].state().items():
                assert all(torch.equal(worker.state()[name], value) for worker in workers)
            assert workers[0].optimizer.version == 4 * 48
        finish(server, workers)
        assert min(worker.accuracy() for worker in workers) > 0.85


@pytest.mark.long
def test_a_stopped_worker_holds_the_others_up_at_a_global_round_and_nowhere_else():
    tau = 9
    with LocalServer(lease_seconds=60) as server:
        victim = start_victim(server, tau)
        try:
            workers = fleet(server, 2, tau=tau)
            meeting = next_global_round(workers, tau)
            assert together(workers, lambda worker: worker.until(meeting - 1)) == [None, None]
            wait_until(lambda: last_step(server, "victim") == meeting)  # where it waits for us
            suspend(victim.pid)
            assert together(workers, lambda worker: worker.until(meeting + tau)) == [None, None]
            for worker in workers:
                run_of(worker.optimizer).settings = IMPATIENT
            held = together(workers, lambda worker: worker.train(1))
            assert [type(error) for error in held] == [HeldBackError, HeldBackError]
            assert "waited" in str(held[0])
            victim.send_signal(signal.SIGCONT)
            wait_until(lambda: together(workers, lambda worker: worker.optimizer.pull()) == [None, None])
        finally:
            victim.kill()
            victim.wait(30)


def next_global_round(workers, tau):
    """Return the step of the next global round that comes after the first step of each of these workers."""
    return (max(run_of(worker.optimizer).first_step for worker in workers) // (tau + 1) + 1) * (tau + 1)


def test_a_worker_that_dies_frees_those_who_wait_for_it_when_its_lease_ends():
    tau = 3
    with LocalServer(lease_seconds=1.5) as server:
        victim = start_victim(server, tau)
        workers = fleet(server, 2, tau=tau)
        victim.kill()
        victim.wait(30)
        # The victim may have pushed for the first global round. The second waits for its lease; one push later:
        last = next_global_round(workers, tau) + tau + 2
        assert together(workers, lambda worker: worker.until(last)) == [None, None]
        assert workers[0].optimizer.live_workers == 2


class Constant:
    """A worker with one parameter whose gradient is always the same; rate 1."""

    def __init__(self, server, name, gradient, **options):
        self.gradient = torch.full((5,), float(gradient))
        self.parameter = nn.Parameter(torch.full((5,), 8.0))
        self.optimizer = psclient.WAGMA(
            torch.optim.SGD([self.parameter], lr=1.0), server=server, worker=name, settings=QUICK, **options
        )

    def step(self):
        self.parameter.grad = self.gradient.clone()
        self.optimizer.step()
        return self.parameter[0].item()


def test_alone_it_is_the_inner_optimizer_whose_state_stays_on_the_worker():
    here = make_model(batch_norm=False)
    adam = torch.optim.Adam(here.parameters(), lr=0.01)
    with LocalServer(down_mode="exact") as server:
        worker = Worker(server, inner=partial(torch.optim.Adam, lr=0.01))
        inner, optimizer = worker.optimizer.inner_optimizer, worker.optimizer
        schedules = [torch.optim.lr_scheduler.StepLR(each, 5, 0.5) for each in (adam, inner)]
        for _ in range(12):
            train_step(here, adam, *worker.data)
            worker.train(1)
            for schedule in schedules:
                schedule.step()
            assert_close(worker.model, here, 1e-5, 1e-6)
        assert optimizer.param_groups[0]["lr"] == adam.param_groups[0]["lr"] == 0.0025
        assert not any("exp_avg" in state for state in optimizer.state.values())
        saved = copy.deepcopy(optimizer.state_dict())  # as torch.save would
        moments = inner.state_dict()["state"][0]["exp_avg"].clone()
        train_step(worker.model, optimizer, *worker.data)
        optimizer.load_state_dict(saved)
        assert torch.equal(inner.state_dict()["state"][0]["exp_avg"], moments)
        assert_same_parameters(worker.model, server.server)
        optimizer.close()


@pytest.mark.parametrize(("late", "expected"), [("replace", 8 - (2 + 4) / 2), ("paper", 8 - (2 + 4) / 3)])
def test_the_rule_for_the_late_through_real_calls(late, expected):
    with LocalServer() as server:
        a, b = (Constant(server, name, gradient, late=late) for name, gradient in (("a", 2), ("b", 4)))
        assert a.step() == 7.0  # with b's first model: no time is known yet, so nobody is waited for
        assert b.step() == pytest.approx(expected)
        [model] = psclient.download(server.server).values()
        torch.testing.assert_close(model, torch.full((5,), (7 + expected) / 2))


def test_without_room_for_a_sum_the_first_waits_for_the_late():
    with LocalServer(memory_bytes=1) as server, ThreadPoolExecutor(1) as pool:
        a, b = (Constant(server, name, gradient) for name, gradient in (("a", 2), ("b", 4)))
        first = pool.submit(a.step)
        with pytest.raises(TimeoutError):
            first.result(1.0)
        assert b.step() == first.result(60) == 8 - (2 + 4) / 2


def test_a_newcomer_begins_with_the_mean_and_takes_part():
    with LocalServer(down_mode="exact") as server:
        a, b = (Constant(server, name, gradient, tau=0) for name, gradient in (("a", 1), ("b", 3)))
        for step in range(1, 4):
            assert together([a, b], lambda worker: worker.step()) == [None, None]
            assert a.parameter[0].item() == b.parameter[0].item() == 8 - 2 * step
        c = Constant(server, "c", 5, tau=0)
        assert c.parameter[0].item() == 2
        assert together([a, b, c], lambda worker: worker.step()) == [None] * 3
        assert c.optimizer.report.step == a.optimizer.report.step == 4
        assert c.parameter[0].item() == pytest.approx(-1)
        b.optimizer.close()
        assert together([a, c], lambda worker: worker.step()) == [None] * 2
        assert a.parameter[0].item() == c.parameter[0].item() == pytest.approx(-4)


def test_a_server_that_is_killed_finds_every_model_again(tmp_path):
    with LocalServer(data_dir=tmp_path, down_mode="exact", lease_seconds=60) as server:
        workers = fleet(server, 3, tau=4, density=0.1)
        all_train(workers, 8)  # in the middle between two global rounds
        before = [worker.state() for worker in workers]
        server.processes[0].send_signal(signal.SIGKILL)
        server.restart(0)
        for worker, state in zip(workers, before, strict=True):
            worker.optimizer.pull()
            assert all(torch.equal(value, state[name]) for name, value in worker.state().items())
        all_train(workers, 3)
        assert {worker.optimizer.report.step for worker in workers} == {11}
        finish(server, workers)
