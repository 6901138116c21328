"""Local steps and a push of their difference, through real servers."""

import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psclient
from psclient.errors import ConfigurationError, NonFiniteGradientError, ServerUnreachableError
from tests.system.tools import (
    QUICK,
    assert_close,
    assert_same_parameters,
    at_once,
    engine_of,
    local_steps,
    make_data,
    make_model,
    train_step,
)
from tests.tiers import long_but

ADAM = {"lr": 0.01}


def model():
    return make_model(batch_norm=False)


def outer(mine, sync_every=4, inner=None, **options):
    """With ``lr``, ``momentum`` and ``nesterov``, the server's step is SGD with these."""
    inner = inner or torch.optim.Adam(mine.parameters(), **ADAM)
    step = {name: options.pop(name) for name in ("lr", "momentum", "nesterov") if name in options}
    described = {"outer_optimizer": ("SGD", {"lr": 0.7} | step)} if step else {}
    return psclient.Outer(inner, sync_every=sync_every, model=mine, **described, **({"settings": QUICK} | options))


def values(one):
    return [parameter.detach().clone() for parameter in one.parameters()]


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_servers_step_is_sgd_on_the_differences(nesterov):
    """DiLoCo's outer step, worked out by hand with torch.optim.SGD."""
    here, there = model(), model()
    outside = [nn.Parameter(value) for value in values(here)]
    step_out = torch.optim.SGD(outside, lr=0.7, momentum=0.9, nesterov=nesterov)
    local = torch.optim.Adam(here.parameters(), **ADAM)
    with outer(there, lr=0.7, momentum=0.9, nesterov=nesterov) as optimizer:
        for step in range(12):
            batch = make_data(seed=step, count=32)
            train_step(here, local, *batch)
            train_step(there, optimizer, *batch)
            if step % 4 == 3:
                for parameter, start in zip(here.parameters(), outside, strict=True):
                    start.grad = start.detach() - parameter.detach()
                step_out.step()
                with torch.no_grad():
                    for parameter, start in zip(here.parameters(), outside, strict=True):
                        parameter.copy_(start)
                assert_close(there, here, 1e-4, 1e-6)


@pytest.mark.parametrize("rounds", [None, psclient.Rounds(start_workers=2)])
@pytest.mark.parametrize("density", long_but([0.3], [1.0, 0.3]))
def test_two_workers_train(rounds, density):
    x, y = make_data(seed=77)
    models = [model() for _ in range(2)]  # here: threads would draw from one generator at the same time

    def work(server, worker):
        mine = models[worker]
        momentum = 0.5 if rounds else 0.0  # without rounds, momentum on top of the sum of all steps learns nothing
        settings = {"rounds": rounds, "density": density, "momentum": momentum}
        with outer(mine, server=server, worker=f"worker-{worker}", **settings) as optimizer:
            for step in range(80):
                train_step(mine, optimizer, *make_data(seed=1000 * worker + step, count=32))
        return nn.functional.cross_entropy(mine(x), y).item()

    with psclient.LocalServer() as server:
        losses = at_once(partial(work, server), range(2))
    before = nn.functional.cross_entropy(model()(x), y).item()
    assert all(loss < 0.7 * before for loss in losses)


def test_what_is_not_sent_is_kept_and_a_flush_hands_in_everything():
    mine = model()
    before = values(mine)
    done = [torch.zeros_like(value) for value in before]
    settings = {"lr": 1.0, "momentum": 0.0, "density": 0.05}
    with psclient.LocalServer(down_mode="exact") as server, outer(mine, 3, server=server, **settings) as optimizer:
        optimizer._steps.inner = _Watched(optimizer.inner_optimizer, mine, done)
        for step in range(10):
            train_step(mine, optimizer, *make_data(seed=step, count=32))
        assert local_steps(optimizer) == 1
        assert any(bool(optimizer.state[p]["residual"].any()) for p in mine.parameters())
        optimizer.flush()
        optimizer.pull()
        assert_same_parameters(mine, server.server)
        for parameter, start, total in zip(mine.parameters(), before, done, strict=True):
            assert not optimizer.state[parameter]["residual"].any()
            torch.testing.assert_close(parameter.detach(), start + total, rtol=1e-4, atol=1e-5)


class _Watched:
    """An inner optimizer whose way is added up."""

    def __init__(self, inner, model, done):
        self.inner, self.model, self.done = inner, model, done
        self.param_groups = inner.param_groups

    def step(self):
        before = values(self.model)
        self.inner.step()
        for total, new, old in zip(self.done, values(self.model), before, strict=True):
            total += new - old


def test_a_pull_between_keeps_the_local_steps():
    one, two = model(), model()
    with (
        psclient.LocalServer() as server,
        outer(one, 4, server=server, worker="one") as first,
        outer(two, 4, server=server, worker="two", lr=0.7) as second,
    ):
        for step in range(4):
            train_step(two, second, *make_data(seed=step, count=32))
        moved = [new - old for new, old in zip(values(two), values(model()), strict=True)]
        for step in range(2):
            train_step(one, first, *make_data(seed=step, count=32))
        before = values(one)
        first.pull()
        assert local_steps(first) == 2
        for now, was, change in zip(values(one), before, moved, strict=True):
            torch.testing.assert_close(now, was + change, rtol=1e-4, atol=1e-6)


def test_a_lost_server_is_waited_for_and_nothing_is_lost_or_pushed_twice(tmp_path):
    here, there = model(), model()
    local = torch.optim.Adam(here.parameters(), **ADAM)
    hasty = QUICK.model_copy(update={"patience_seconds": 1.0, "deadline_seconds": 1.0})
    settings = {"lr": 1.0, "momentum": 0.0, "settings": hasty}
    with psclient.LocalServer(data_dir=tmp_path) as server, outer(there, server=server, **settings) as optimizer:
        for step in range(8):
            batch = make_data(seed=step, count=32)
            train_step(here, local, *batch)
            if step != 3:
                train_step(there, optimizer, *batch)
                continue
            server.processes[0].kill()
            server.processes[0].wait()
            with pytest.raises(ServerUnreachableError):
                train_step(there, optimizer, *batch)
            server.restart()
            once_more(optimizer)  # as the error says; no gradient has changed since
            assert local_steps(optimizer) == 0
        assert optimizer.version == 2
        assert_close(there, here, 1e-5, 1e-6)


def once_more(optimizer):
    """The first attempts may meet a channel that has not dialled again yet."""
    for _ in range(30):
        try:
            return optimizer.step()
        except ServerUnreachableError:
            continue
    raise AssertionError("the server is back, and was not found")


def test_local_steps_that_lead_nowhere_are_undone():
    mine = model()
    inner = torch.optim.SGD(mine.parameters(), lr=0.1)
    with outer(mine, 2, inner) as optimizer:
        start = values(mine)
        train_step(mine, optimizer, *make_data(count=32))
        hook = inner.register_step_post_hook(lambda *_: mine[0].weight.fill_(float("inf")))
        with pytest.raises(NonFiniteGradientError, match=r"0\.weight"):
            train_step(mine, optimizer, *make_data(count=32))
        hook.remove()
        assert all(map(torch.equal, values(mine), start))
        for step in range(2):
            train_step(mine, optimizer, *make_data(seed=step, count=32))
        assert optimizer.version == 1


def test_both_states_are_saved():
    mine, again = model(), model()
    with psclient.LocalServer() as server:
        with outer(mine, density=0.1, server=server, worker="one") as optimizer:
            for step in range(6):
                train_step(mine, optimizer, *make_data(seed=step, count=32))
            saved = optimizer.state_dict()
        with outer(again, density=0.1, server=server, worker="one") as optimizer:
            optimizer.load_state_dict(saved)
            for number, parameter in enumerate(again.parameters()):
                moments = saved["state"][number]["inner"]["exp_avg"]
                assert torch.equal(optimizer.inner_optimizer.state[parameter]["exp_avg"], moments)
            with pytest.raises(ConfigurationError, match=r"inner_optimizer\.load_state_dict"):
                optimizer.load_state_dict(optimizer.inner_optimizer.state_dict())


def test_a_schedule_drives_the_inner_rate():
    mine = model()
    inner = torch.optim.SGD(mine.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    with outer(mine, 2, inner) as optimizer:
        for step in range(3):
            train_step(mine, optimizer, *make_data(seed=step, count=32))
            schedule.step()
    assert inner.param_groups[0]["lr"] == pytest.approx(0.0125)


def test_the_groups_are_the_inner_optimizers():
    """A rate set on either, and a scheduler built on either, is the inner's."""
    mine = model()
    inner = torch.optim.SGD([{"params": mine[0].parameters()}, {"params": mine[2].parameters(), "lr": 0.2}], lr=0.1)
    with outer(mine, 2, inner, lr=0.7) as optimizer:
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        train_step(mine, optimizer, *make_data(count=32))
        schedule.step()
        assert [group["lr"] for group in inner.param_groups] == [0.05, 0.1]
        inner.load_state_dict(inner.state_dict())  # torch makes new groups of it
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        before = values(mine)
        train_step(mine, optimizer, *make_data(count=32, seed=2))
        assert optimizer.version == 1
        pushed = values(mine)
        assert not all(torch.equal(now, was) for now, was in zip(pushed, before, strict=True)), "0.7 of the first step"
        optimizer.load_state_dict(optimizer.state_dict())
        assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
        assert optimizer.param_groups is inner.param_groups
        assert optimizer.lr == 0.7
        with pytest.raises(AttributeError):
            optimizer.lr = 0.5


def test_a_rate_of_zero_on_the_groups_stands_still():
    mine = model()
    with outer(mine, 2) as optimizer:
        before = values(mine)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for step in range(4):
            train_step(mine, optimizer, *make_data(seed=step, count=32))
        assert optimizer.version == 2
        assert all(map(torch.equal, values(mine), before))


def test_an_inner_optimizer_that_cannot_go_without_a_closure_is_refused():
    mine = model()
    with pytest.raises(ConfigurationError, match="LBFGS"):
        outer(mine, 2, torch.optim.LBFGS(mine.parameters()))


@pytest.mark.parametrize(("rounds", "said"), [(None, 1), (psclient.Rounds(), 0)])
def test_momentum_without_rounds_is_warned_of_at_once(rounds, said, caplog):
    with outer(model(), 2, momentum=0.9, rounds=rounds):
        assert caplog.text.count("momentum=0.9") == said


@pytest.mark.parametrize(
    "wrong", [{"sync_every": 0}, {"sync_every": 2.5}, {"decay": 1.5}, {"overlap": True}, {"density": 0.0}]
)
def test_what_makes_no_sense_is_refused_at_once(wrong):
    with pytest.raises(ConfigurationError):
        outer(model(), **wrong)


def test_elastic_epochs_hand_the_last_local_steps_in():
    """The epoch's ten steps are no multiple of the period, and no other worker is to wait for what is left."""
    x, y = make_data(seed=1, count=100)
    seen = [0] * 100
    mine = model()
    with psclient.LocalServer() as server, outer(mine, 4, server=server, worker="one") as optimizer:
        sampler = psclient.ElasticSampler(100, optimizer=optimizer, lease_samples=30)
        loader = torch.utils.data.DataLoader(range(100), sampler=sampler, batch_size=10)
        for _ in sampler.epochs(2):
            for batch in loader:
                train_step(mine, optimizer, x[batch], y[batch])
                for sample in batch.tolist():
                    seen[sample] += 1
        assert local_steps(optimizer) == 0
    assert seen == [2] * 100


def test_samples_are_counted_and_not_given():
    mine = model()
    with outer(mine, 2) as optimizer:
        for step in range(4):
            train_step(mine, optimizer, *make_data(seed=step, count=32))
        assert optimizer.totals.samples == 128
        with pytest.raises(ConfigurationError, match="samples"):
            optimizer.step(samples=3)


def test_a_pull_that_fails_half_way_is_no_step_of_this_worker(monkeypatch):
    """What had come by then is others' work, and must not be handed in as if it were to be undone."""
    with psclient.LocalServer() as server:
        mine, other = model(), model()
        with (
            outer(mine, 1, lr=1.0, momentum=0.0, server=server, worker="mine") as optimizer,
            outer(other, 1, lr=1.0, momentum=0.0, server=server, worker="other") as others,
        ):
            train_step(other, others, *make_data(seed=1, count=32))
            expected = values(other)
            write = engine_of(optimizer)._write

            def interrupted(*arguments):
                write(*arguments)
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(engine_of(optimizer), "_write", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    optimizer.pull()
            optimizer.flush()
            others.pull()
            optimizer.pull()
            for ours, theirs, before in zip(values(mine), values(other), expected, strict=True):
                assert torch.equal(ours, before)
                assert torch.equal(theirs, before)


def test_a_flush_of_local_steps_that_lead_nowhere_undoes_them():
    mine = model()
    inner = torch.optim.SGD(mine.parameters(), lr=0.1)
    inner.register_step_post_hook(lambda *_: mine[0].weight.fill_(float("inf")))
    with outer(mine, 4, inner) as optimizer:
        before = values(mine)
        train_step(mine, optimizer, *make_data(count=8))
        with pytest.raises(NonFiniteGradientError):
            optimizer.flush()
        optimizer.flush()
        optimizer.pull()
        assert all(map(torch.equal, values(mine), before))


def test_handing_in_is_a_push_like_any_other_and_keeps_the_error():
    mine = model()
    settings = psclient.ClientSettings(dense_below=0)
    with (
        psclient.LocalServer(down_mode="exact") as server,
        outer(mine, 3, density=0.1, server=server, settings=settings) as optimizer,
    ):
        for step in range(3):
            train_step(mine, optimizer, *make_data(seed=step, count=32))
        version, after_a_period = optimizer.version, optimizer.report.push_entries
        train_step(mine, optimizer, *make_data(seed=4, count=32))
        optimizer._flush_on_exit()
        assert local_steps(optimizer) == 0
        assert optimizer.version == version + 1
        assert optimizer.report.push_entries <= 1.3 * after_a_period
        assert all(bool(optimizer.state[p]["residual"].any()) for p in mine.parameters() if p.numel() > 10)
        for ours, servers in zip(values(mine), psclient.download(optimizer.server).values(), strict=True):
            assert torch.equal(ours, servers)
        optimizer._flush_on_exit()  # nothing is left to hand in
        assert optimizer.version == version + 1


def test_at_an_epochs_end_local_steps_are_handed_in_with_their_samples():
    """Else each worker waits for samples that the others have trained and not pushed."""
    data, met = TensorDataset(torch.arange(52)), threading.Barrier(2)
    drawn = {"anna": [], "bert": []}
    with psclient.LocalServer() as server:

        def work(name):
            mine = model()
            patience = QUICK.model_copy(update={"patience_seconds": 5.0})
            with outer(mine, 5, lr=1.0, momentum=0.0, server=server, worker=name, settings=patience) as optimizer:
                sampler = psclient.ElasticSampler(data, optimizer, lease_samples=8)
                met.wait()
                for _ in sampler.epochs(2):
                    for (numbers,) in DataLoader(data, batch_size=4, sampler=sampler):
                        train_step(mine, optimizer, *make_data(count=len(numbers)))
                        drawn[name] += numbers.tolist()

        at_once(work, drawn)
    assert sorted(drawn["anna"] + drawn["bert"]) == sorted([*range(52)] * 2)


def test_two_workers_learn_with_the_defaults_and_a_warning_names_the_rounds(caplog):
    """Without rounds each worker's whole way is added to the others'. Momentum on top of that learns nothing."""
    models = [model(), model()]
    with psclient.LocalServer(down_mode="exact") as server:
        makers = [outer(mine, 4, server=server, worker=f"w{number}") for number, mine in enumerate(models)]
        with makers[0], makers[1]:
            for step in range(160):  # by turns, so that each push is one version old
                for number, (mine, optimizer) in enumerate(zip(models, makers, strict=True)):
                    train_step(mine, optimizer, *make_data(seed=2 * step + number, count=32))
        served = model()
        served.load_state_dict(psclient.download(server.server))
    x, y = make_data(seed=999)
    with torch.no_grad():
        right = (served(x).argmax(1) == y).float().mean().item()
    assert right > 0.85
    assert caplog.text.count("psclient.Rounds()") == 2, "each worker says it once"


def test_one_worker_and_rounds_are_not_warned_of(caplog):
    for options in ({}, {"rounds": psclient.Rounds()}):
        mine = model()
        with outer(mine, 1, **options) as optimizer:
            train_step(mine, optimizer, *make_data())
    assert "psclient.Rounds()" not in caplog.text
