"""``wait_for_all()``: the worker that ends first waits for the others, and all of them save one model."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

import psclient
from psclient.errors import ConfigurationError, WorkersStillTrainingError
from psclient.rpc.local_server import LocalServer
from tests.system.tools import QUICK, local_steps, make_data, make_model, train_step, wait_until
from tests.tiers import long_but

LONG = 120.0


class Worker:
    """A model, its optimizer, and the thread in which it waits."""

    def __init__(self, server, name, make=None, **options):
        self.model = make_model(batch_norm=False)
        make = make or (lambda m, **given: psclient.ASGD(m.parameters(), lr=0.1, **given))
        given = {"model": self.model, "server": server, "worker": name, "settings": QUICK} | options
        self.optimizer = make(self.model, **given)
        self.threads = ThreadPoolExecutor(1)

    def train(self, steps=1):
        for step in range(steps):
            train_step(self.model, self.optimizer, *make_data(step))

    def wait(self, seconds=LONG):
        """Begin to wait."""
        return self.threads.submit(self.optimizer.wait_for_all, seconds)

    def pulled(self):
        self.optimizer.pull()
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def close(self):
        self.optimizer.close()
        self.threads.shutdown()


@contextmanager
def workers(server, *names, **options):
    made = [Worker(server, name, **options) for name in names]
    try:
        yield made
    finally:
        for each in made:
            each.close()


def assert_one_model(*these):
    first, *others = [each.pulled() for each in these]
    for other in others:
        assert all(map(torch.equal, first, other))


def is_through(server, name):
    """Whether the others would not wait for a worker: its name is not among those whom a look at shard 0 names."""
    looker = Worker(server, "looker")
    try:
        looker.optimizer.wait_for_all(0)
    except WorkersStillTrainingError as error:
        return name not in error.workers
    finally:
        looker.close()
    return True


METHODS = {
    "asgd": None,
    "rmsprop": lambda m, **given: psclient.ServerRMSprop(m.parameters(), **given),
    "outer": lambda m, **given: psclient.Outer(torch.optim.SGD(m.parameters(), lr=0.1), sync_every=3, **given),
    "overlap": lambda m, **given: psclient.DGS(m.parameters(), lr=0.1, overlap=True, **given),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shards", long_but([2], [1, 2]))
def test_the_first_waits_until_the_last_is_through_and_both_have_one_model(method, shards):
    with LocalServer(shards) as server, workers(server, "first", "last", make=METHODS[method]) as (first, last):
        first.train(2)
        waiting = first.wait()
        last.train(4)
        assert not waiting.done()
        last.optimizer.wait_for_all(LONG)
        waiting.result(LONG)
        assert_one_model(first, last)


def test_local_steps_are_pushed_before_the_wait():
    with LocalServer() as server, workers(server, "one", make=METHODS["outer"]) as (one,):
        one.train(2)
        assert one.optimizer.version == 0
        one.optimizer.wait_for_all(LONG)
        assert (one.optimizer.version, local_steps(one.optimizer)) == (1, 0)


def test_buffers_are_the_average_of_all_afterwards():
    with LocalServer(buffer_period_steps=1000) as server:
        models = [make_model(i) for i in range(2)]
        made = [
            psclient.ASGD(each.parameters(), lr=0.1, model=each, server=server, worker=f"w-{i}", settings=QUICK)
            for i, each in enumerate(models)
        ]
        for i, (model, optimizer) in enumerate(zip(models, made, strict=True)):
            for step in range(3):
                train_step(model, optimizer, *make_data(10 * i + step))
        with ThreadPoolExecutor(2) as threads:
            for each in [threads.submit(optimizer.wait_for_all, LONG) for optimizer in made]:
                each.result()
        for optimizer in made:
            optimizer.pull()
        one, two = (model.state_dict() for model in models)
        assert all(torch.equal(one[name], two[name]) for name in one)
        for optimizer in made:
            optimizer.close()


def test_one_that_leaves_is_not_waited_for():
    with LocalServer() as server, workers(server, "first", "last") as (first, last):
        waiting = first.wait()
        last.train()
        last.optimizer.close()
        waiting.result(LONG)


def test_one_that_joins_meanwhile_counts():
    with LocalServer() as server, workers(server, "first", "second") as (first, second):
        waiting = first.wait()
        with workers(server, "third") as (third,):
            wait_until(lambda: is_through(server, "first"))
            others = second.wait()
            third.train()
            assert not waiting.done()
            assert not others.done()
            third.optimizer.wait_for_all(LONG)
            waiting.result(LONG)
            others.result(LONG)


def test_a_dead_one_is_waited_for_until_its_lease_ends():
    script = (
        "import sys, torch, psclient\n"
        "model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))\n"
        "kept = psclient.ASGD(model.parameters(), lr=0.1, model=model, server=sys.argv[1], worker='dead')\n"
        "print('joined', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with LocalServer(lease_seconds=3) as server, workers(server, "first") as (first,):
        command = [sys.executable, "-c", script, server.server]
        dead = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert dead.stdout.readline() == "joined\n"
        waiting = first.wait()
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        waiting.result(LONG)


@pytest.mark.parametrize("shards", [1, 2])
def test_at_the_deadline_it_names_whom_it_waited_for_and_the_wait_goes_on_where_it_was(shards):
    with LocalServer(shards) as server, workers(server, "first", "slow-a", "slow-b") as (first, slow, slower):
        first.train()
        with pytest.raises(WorkersStillTrainingError, match="slow-a, slow-b") as raised:
            first.optimizer.wait_for_all(0.3)
        assert raised.value.workers == ("slow-a", "slow-b")
        waiting = [slow.wait(), slower.wait()]  # all are through now, the first too: it has pushed nothing since
        for each in waiting:
            each.result(LONG)
        slow.train()  # and goes on
        first.optimizer.wait_for_all(LONG)  # over since then, whatever the others do now


def test_a_worker_that_goes_on_after_a_wait_in_vain_is_waited_for_again():
    with LocalServer() as server, workers(server, "first", "last") as (first, last):
        with pytest.raises(WorkersStillTrainingError):
            first.optimizer.wait_for_all(0)
        first.train()
        with pytest.raises(WorkersStillTrainingError, match="first"):
            last.optimizer.wait_for_all(0)
        first.optimizer.wait_for_all(LONG)
        last.optimizer.wait_for_all(LONG)


def test_waits_can_be_made_again_and_again():
    with LocalServer() as server, workers(server, "a", "b") as (one, two):
        for _ in range(3):
            one.train()
            waiting = one.wait()
            two.train(2)
            assert not waiting.done()
            two.optimizer.wait_for_all(LONG)
            waiting.result(LONG)
            assert_one_model(one, two)


@pytest.mark.parametrize("shards", [1, 2])
def test_rounds_go_on_without_the_one_that_waits(shards):
    def make(m, **given):
        return psclient.SSGD(m.parameters(), lr=0.1, rounds=psclient.Rounds(), **given)

    with LocalServer(shards) as server, workers(server, "first", "last", make=make) as (first, last):
        with ThreadPoolExecutor(2) as threads:
            for each in [threads.submit(worker.train, 2) for worker in (first, last)]:
                each.result(LONG)
        waiting = first.wait()
        last.train(4)  # each of these would wait for the first
        assert last.optimizer.version == 6
        last.optimizer.wait_for_all(LONG)
        waiting.result(LONG)
        assert_one_model(first, last)


def test_a_round_that_waits_for_one_closes_when_that_one_waits_for_all():
    def make(m, **given):
        return psclient.SSGD(m.parameters(), lr=0.1, rounds=psclient.Rounds(), **given)

    with LocalServer() as server, workers(server, "first", "last", make=make) as (first, last):
        step = last.threads.submit(last.train)
        with pytest.raises(TimeoutError):
            step.result(0.5)
        waiting = first.wait()
        step.result(LONG)
        last.optimizer.wait_for_all(LONG)
        waiting.result(LONG)


def test_a_bound_on_leads_does_not_count_the_one_that_waits():
    with LocalServer(ssp_bound=2) as server, workers(server, "first", "last") as (first, last):
        waiting = first.wait()
        wait_until(lambda: is_through(server, "first"))
        last.train(6)
        last.optimizer.wait_for_all(LONG)
        waiting.result(LONG)
        last.train(2)  # the clocks are equal again: the first is not 6 pushes behind
        first.train(2)


def test_it_goes_on_over_a_restart_of_the_server(tmp_path):
    with LocalServer(data_dir=tmp_path) as server, workers(server, "first", "last") as (first, last):
        waiting = first.wait()
        wait_until(lambda: is_through(server.server, "first"))
        server.processes[0].kill()
        server.processes[0].wait()
        server.restart()
        last.train()
        assert not waiting.done()
        last.optimizer.wait_for_all(LONG)
        waiting.result(LONG)
        assert_one_model(first, last)


def test_it_ends_with_the_run():
    with LocalServer() as server, workers(server, "first", "last") as (first, _):
        waiting = first.wait()
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        subprocess.run([sys.executable, "-m", "psservice", "finish", server.server], check=True, timeout=60)
        waiting.result(LONG)
        assert first.optimizer.finished


def test_alone_nobody_waits():
    model = make_model(batch_norm=False)
    with psclient.DGS(model.parameters(), lr=0.1, model=model, settings=QUICK) as optimizer:
        train_step(model, optimizer, *make_data())
        optimizer.wait_for_all()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait(number):
    script = (
        "import sys, torch, psclient\n"
        "model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))\n"
        "with psclient.ASGD(model.parameters(), lr=0.1, model=model, server=sys.argv[1], worker='waits') as o:\n"
        "    print('joined', flush=True)\n"
        "    o.wait_for_all()\n"
        "print('over', flush=True)\n"
    )
    with LocalServer() as server, workers(server, "other") as (other,):
        command = [sys.executable, "-c", script, server.server]
        patient = os.environ | {"PSCLIENT_DEADLINE_SECONDS": "1000"}  # the server holds a call for half of that
        process = subprocess.Popen(command, env=patient, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "joined\n"
        wait_until(lambda: is_through(server, "waits"))
        process.send_signal(number)
        out, err = process.communicate(timeout=LONG)
        assert "over" not in out
        assert process.returncode == (143 if number == signal.SIGTERM else -signal.SIGINT), err
        other.optimizer.wait_for_all(LONG)  # nobody is left


def test_what_cannot_be_waited_for_is_said_at_once():
    model = make_model(batch_norm=False)
    with psclient.ASGD(model.parameters(), lr=0.1, model=model, settings=QUICK) as optimizer:
        for seconds in (-1, float("nan"), "60", True):
            with pytest.raises(ConfigurationError, match="seconds"):
                optimizer.wait_for_all(seconds)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        psclient.WAGMA(inner, model=model, settings=QUICK) as wagma,
        pytest.raises(ConfigurationError, match="a model each"),
    ):
        wagma.wait_for_all()
