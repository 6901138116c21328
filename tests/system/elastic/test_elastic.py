"""Elastic data through real servers: each sample once an epoch, however loaders draw and whoever comes and goes."""

import os
import signal
from collections import Counter
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import psclient
from psclient.rpc.local_server import LocalServer
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.cli.main import main
from psservice.ctl.client import call
from tests.system.tools import QUICK, make_data, make_model, run_of, train_step, wait_until
from tests.tiers import long_but

COUNT = 120


@pytest.fixture(scope="module")
def server():
    """One for all tests that do not harm it; each has a dataset of its own."""
    with LocalServer(down_mode="exact") as running:
        yield running


class Worker:
    """A worker that writes down which samples its steps have trained, by epoch."""

    def __init__(self, server, name="w", *, method=psclient.ASGD, loader=None, overlap=False, **sampling):
        x, y = make_data(count=COUNT)
        self.dataset = TensorDataset(x, y, torch.arange(COUNT))
        self.model = make_model(batch_norm=False)
        self.optimizer = method(
            self.model.parameters(),
            lr=0.01,
            model=self.model,
            server=server.server,
            worker=name,
            overlap=overlap,
            settings=QUICK,
        )
        name = os.environ["PYTEST_CURRENT_TEST"]
        self.sampler = psclient.ElasticSampler(
            self.dataset, self.optimizer, **({"lease_samples": 16, "name": name} | sampling)
        )
        self.loader = DataLoader(self.dataset, sampler=self.sampler, **({"batch_size": 8} | (loader or {})))
        self.trained = Counter()

    def steps(self):
        """Train one pass, a batch each time this is advanced."""
        for x, y, index in self.loader:
            train_step(self.model, self.optimizer, x, y)
            self.trained.update(index.tolist())
            yield len(index)

    def one_pass(self):
        return sum(self.steps())

    def held(self):
        """How many samples the server has in this worker's hands."""
        answer = self.sampler._request_lease(self.sampler.epoch, 0, {})
        return sum(each.count for each in answer.granted)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.optimizer.close()


def times(number):
    return Counter(dict.fromkeys(range(COUNT), number))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "loader",
    long_but(
        [{"num_workers": 2, "prefetch_factor": 3}], [{}, {"num_workers": 2, "prefetch_factor": 3}, {"batch_size": 7}]
    ),
)
def test_one_worker_trains_every_sample_once_an_epoch(server, loader, overlap):
    with Worker(server, loader=loader, overlap=overlap) as worker:
        for number in range(3):
            assert worker.one_pass() == COUNT
            assert worker.trained == times(number + 1)
            assert worker.sampler.epoch == number
        worker.optimizer.flush()  # with overlap, the last push may still be on its way
        assert worker.held() == 0


def test_every_epoch_has_an_order_of_its_own_or_the_datasets(server):
    with Worker(server) as worker:
        orders = [tuple(worker.sampler) for _ in range(2)]
        assert sorted(orders[0]) == list(range(COUNT))
        assert orders[0] != tuple(range(COUNT))
        plain = psclient.ElasticSampler(COUNT, worker.optimizer, name="plain", shuffle=False)
        assert list(plain) == list(range(COUNT))


def test_a_fast_worker_takes_more(server):
    with Worker(server, "fast") as fast, Worker(server, "slow") as slow:
        fast_steps, slow_steps = fast.steps(), slow.steps()
        while any([*islice(fast_steps, 3), *islice(slow_steps, 1)]):
            pass
        assert fast.trained + slow.trained == times(1)
        assert fast.trained.total() > 2 * slow.trained.total() > 0


def test_what_a_worker_leaves_goes_to_the_others(server):
    with Worker(server, "stays") as stays:
        with Worker(server, "leaves") as leaves:
            assert len([*islice(leaves.steps(), 3)]) == 3
        stays.one_pass()
        assert stays.trained + leaves.trained == times(1)


def test_a_late_worker_begins_in_the_epoch_that_the_others_are_in(server):
    with Worker(server, "early") as early:
        early.one_pass()
        early_steps = early.steps()
        assert len([*islice(early_steps, 2)]) == 2
        with Worker(server, "late") as late:
            late_steps = late.steps()
            while any([*islice(early_steps, 1), *islice(late_steps, 1)]):
                pass
            assert late.sampler.epoch == 1
            assert late.trained.total() > 30
            assert early.trained + late.trained == times(2)


def test_a_loop_that_is_left_goes_on_where_it_was(server):
    with Worker(server) as worker:
        assert len([*islice(worker.steps(), 3)]) == 3
        assert worker.one_pass() == COUNT - 24
        assert worker.trained == times(1)


def test_what_drop_last_drops_comes_first_in_the_next_pass(server):
    with Worker(server, loader={"batch_size": 50, "drop_last": True}) as worker:
        assert [worker.one_pass() for _ in range(3)] == [100, 100, 150]
        assert worker.sampler.epoch == 2
        assert max(worker.trained.values()) <= 3
        assert worker.trained.total() == 350


def test_a_batch_without_a_step_is_not_lost(server):
    """Gradients of several batches in one step, and some left at the end of the pass."""
    with Worker(server) as worker:
        for number, (x, y, index) in enumerate(worker.loader):
            torch.nn.functional.cross_entropy(worker.model(x), y).backward()
            worker.trained.update(index.tolist())
            if number % 4 == 3:
                worker.optimizer.step()
                worker.optimizer.zero_grad()
        assert worker.trained == times(1)
        assert worker.held() == COUNT % 32
        assert worker.one_pass() == COUNT  # their step is still to come: they are not drawn again
        assert worker.held() == 0


def test_epochs_waits_for_nobody_who_is_alone(server):
    with Worker(server) as worker:
        assert [(epoch, worker.one_pass()) for epoch in worker.sampler.epochs(3)] == [(n, COUNT) for n in range(3)]
        assert [*worker.sampler.epochs(3)] == []


def test_epochs_of_a_second_script_warns_if_the_run_has_nothing_left(server, caplog):
    with Worker(server) as worker:
        assert [worker.one_pass() for _ in worker.sampler.epochs(1)] == [COUNT]
    assert "has yielded nothing" not in caplog.text
    with Worker(server) as again:
        assert [*again.sampler.epochs(1)] == []
    assert "epochs(1) has yielded nothing" in caplog.text


def test_epochs_gives_what_comes_back_in_another_pass(server):
    with Worker(server, "stays") as stays:
        gone = Worker(server, "gone")
        assert len([*islice(gone.steps(), 1)]) == 1
        seen = []
        for epoch in stays.sampler.epochs(1):
            seen.append((epoch, stays.one_pass()))
            gone.optimizer.close()
        assert seen[0][1] + seen[1][1] == COUNT - 8
        assert [epoch for epoch, _ in seen] == [0, 0]
        assert stays.trained + gone.trained == times(1)


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
def test_epochs_sends_again_what_was_refused_at_the_end(overlap):
    with LocalServer(down_mode="exact", max_staleness=1) as server, Worker(server, overlap=overlap) as worker:
        other = make_model(batch_norm=False)
        with psclient.ASGD(
            other.parameters(), lr=0.01, model=other, server=server.server, worker="other", settings=QUICK
        ) as others:
            for _ in worker.sampler.epochs(1):
                for number, (x, y, _) in enumerate(worker.loader):
                    if number == COUNT // 8 - 1:
                        for _ in range(3):
                            train_step(other, others, *make_data())
                    train_step(worker.model, worker.optimizer, x, y)
        assert worker.optimizer.totals.refused >= 1
        assert worker.held() == 0


def test_epochs_says_who_holds_it_up(server):
    impatient = QUICK.model_copy(update={"patience_seconds": 1.0})
    with Worker(server, "hangs") as hangs, Worker(server, "waits") as waits:
        run_of(waits.optimizer).settings = impatient
        hanging = hangs.steps()
        next(hanging)
        epochs = waits.sampler.epochs(1)
        assert next(epochs) == 0
        waits.one_pass()
        with pytest.raises(psclient.errors.EpochHeldUpError) as raised:
            next(epochs)
        assert raised.value.samples == COUNT - waits.trained.total() - 8


def test_who_was_silent_for_too_long_trains_a_batch_twice_and_no_more(monkeypatch):
    with LocalServer(down_mode="exact", lease_seconds=2.0) as server:  # noqa: SIM117
        with Worker(server, "silent", lease_samples=64) as silent, Worker(server, "other") as other:
            steps = silent.steps()
            assert len([*islice(steps, 2)]) == 2
            with monkeypatch.context() as patch:
                patch.setattr(run_of(silent.optimizer).leases, "_renew", lambda: None)
                wait_until(lambda: [each.worker_id for each in status(server).workers] == ["other"])
            others = other.steps()
            assert len([*islice(others, 3)]) == 3
            while any([*islice(steps, 1), *islice(others, 1)]):
                pass
            assert silent.trained | other.trained == times(1)
            assert (silent.trained & other.trained).total() == 8


def status(server):
    return call(server.addresses[0], "GetStatus", pb.GetStatusRequest(), 10.0)


def test_of_two_shards_the_first_knows_the_samples(tmp_path):
    with LocalServer(shards=2, down_mode="exact", data_dir=tmp_path) as server, Worker(server) as worker:
        steps = worker.steps()
        assert len([*islice(steps, 4)]) == 4
        server.processes[1].send_signal(signal.SIGKILL)
        server.restart(1)
        assert sum(steps) == COUNT - 32
        assert worker.trained == times(1)
        assert worker.held() == 0


def test_a_killed_server_hands_out_nothing_twice(tmp_path):
    with LocalServer(down_mode="exact", data_dir=tmp_path) as server, Worker(server) as worker:
        for number, _ in enumerate(worker.steps()):
            if number == 5:
                server.processes[0].send_signal(signal.SIGKILL)
                server.restart()
        assert worker.trained == times(1)
        assert worker.held() == 0


@pytest.mark.long
def test_a_server_that_kept_nothing_goes_on_in_the_workers_epoch():
    with LocalServer(down_mode="exact") as server, Worker(server) as worker:
        worker.one_pass()
        steps = worker.steps()
        next(steps)
        server.processes[0].send_signal(signal.SIGKILL)
        server.restart()
        assert [*steps]
        assert worker.sampler.epoch == 1
        assert worker.trained - times(1) >= times(1)


def test_a_rollback_takes_the_data_back_with_the_model(tmp_path):
    with LocalServer(down_mode="exact", data_dir=tmp_path) as server, Worker(server) as worker:
        steps = worker.steps()
        assert len([*islice(steps, 10)]) == 10
        assert main(["restore", server.addresses[0], "--version", "4"]) == 0
        for _ in worker.sampler.epochs(1):
            worker.one_pass()
        assert worker.held() == 0
        # 32 samples were finished at version 4. The first push after it was refused, so the second has two batches.
        assert worker.optimizer.version == 4 + (COUNT - 32) / 8 - 1


def test_workers_must_agree(server):
    with Worker(server, "one") as one, Worker(server, "other", seed=1) as other:
        one.one_pass()
        with pytest.raises(psclient.errors.SettingsMismatchError, match="seed"):
            other.one_pass()


def test_arguments_are_checked(server):
    with Worker(server) as worker:
        for wrong in ({"data": 0}, {"lease_samples": 0}, {"seed": -1}, {"data": 1 << 49}):
            with pytest.raises(psclient.errors.ConfigurationError):
                psclient.ElasticSampler(**({"data": 5, "optimizer": worker.optimizer} | wrong))
    with pytest.raises(psclient.errors.ConfigurationError, match=r"close\(\)"):
        next(iter(worker.sampler))
    with LocalServer() as other:
        optimizer = psclient.ASGD(make_model().parameters(), lr=0.1, server=other, settings=QUICK)
        with pytest.raises(psclient.errors.ConfigurationError, match="model="):
            psclient.ElasticSampler(5, optimizer)
        optimizer.close()
