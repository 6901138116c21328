"""Overlap: the same training, one step staler, while nothing waits."""

import contextlib
import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

import psclient
from psclient.errors import ConfigurationError, NonFiniteGradientError, RunFinishedError, ServerUnreachableError
from psclient.rpc.local_server import LocalServer
from psclient.settings import ClientSettings
from tests.system.tools import (
    QUICK,
    assert_same_parameters,
    engine_of,
    go_on,
    make_data,
    make_model,
    stop,
    suspend,
    train_step,
    wait_until,
)
from tests.tiers import long_but

EAGER = QUICK.model_copy(update={"bucket_bytes": 1})
"""Every tensor is a group of its own."""


def overlapping(model, server, method=psclient.DGS, **options):
    options = {"lr": 0.1, "density": 0.1, "model": model, "settings": EAGER, "overlap": True} | options
    if method is psclient.ASGD:
        del options["density"]
    return method(model.parameters(), server=server, **options)


def linear(size=50):
    """A layer whose gradient does not depend on its parameters."""
    layer = nn.Linear(size, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


@pytest.mark.parametrize("down_mode", long_but(["topk"], ["exact", "topk"]))
@pytest.mark.parametrize("shards", long_but([2], [1, 2]))
def test_it_trains_and_a_pull_makes_the_replica_whole(shards, down_mode):
    with LocalServer(shards=shards, down_mode=down_mode, down_density=0.2) as server:
        model = make_model(batch_norm=False)
        with overlapping(model, server) as optimizer:
            losses = [train_step(model, optimizer, *make_data()) for _ in range(60)]
            assert losses[-1] < 0.5 * losses[0]
            assert optimizer.version >= 59
            optimizer.pull()
            assert optimizer.version == 60
            if down_mode == "exact":
                assert_same_parameters(model, server.server)


def test_the_reply_to_a_push_is_applied_by_the_end_of_the_next_step(server):
    layer = linear()
    with overlapping(layer, server, psclient.ASGD, lr=1.0) as optimizer:
        for step in range(1, 5):
            layer(torch.ones(1, 50)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            moved = -layer.weight.detach()[0, 0].item()
            assert moved in (step - 1, step), "a reply that is asked for late holds the newest push too"
        optimizer.pull()
        assert torch.equal(layer.weight.detach(), torch.full((1, 50), -4.0))


def test_groups_are_handed_over_during_backward_last_layer_first(server):
    model, order = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30), nn.Linear(30, 3)), []
    with overlapping(model, server) as optimizer:
        send = engine_of(optimizer).send_gradients
        engine_of(optimizer).send_gradients = lambda report, number, *rest: (
            order.append(number),
            send(report, number, *rest),
        )
        nn.functional.cross_entropy(model(torch.randn(8, 30)), torch.zeros(8, dtype=torch.int64)).backward()
        wait_until(lambda: len(order) == 6)  # nobody has called step()
        assert order[0] in (0, 1)
        assert set(order[:2]) == {0, 1}, "the last layer's weight and bias come first"
        optimizer.step()
        assert len(order) == 6
        assert engine_of(optimizer).number == 1


def test_nothing_is_lost_however_values_travel(server):
    for value_type in ("fp32", "bf16", "int4"):
        layer, total = linear(1000), torch.zeros(1, 1000)
        settings = EAGER.model_copy(update={"value_type": value_type})
        with (
            LocalServer(down_mode="exact") as own,
            overlapping(layer, own, psclient.GradientDropping, lr=1.0, settings=settings) as optimizer,
        ):
            for _ in range(10):
                x = torch.randn(1, 1000)
                total += x
                layer(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.pull()
            held = optimizer.state[layer.weight]["residual"].view(1, -1)
            torch.testing.assert_close(total, held - layer.weight.detach(), rtol=1e-4, atol=1e-4)
            optimizer.flush()
            optimizer.pull()
            torch.testing.assert_close(total, -layer.weight.detach(), rtol=1e-4, atol=1e-4)


def test_a_parameter_without_gradient_does_not_hold_the_others_up(server):
    model = make_model(batch_norm=False)
    model.unused = nn.Linear(4, 4)
    with overlapping(model, server) as optimizer:
        before = model.unused.weight.detach().clone()
        for _ in range(3):
            nn.functional.cross_entropy(nn.Sequential.forward(model[:3], make_data()[0]), make_data()[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.pull()
        assert torch.equal(model.unused.weight, before)
        assert optimizer.version == 3


def test_a_second_backward_is_refused_unless_it_accumulates(server):
    layer = linear()
    with overlapping(layer, server, psclient.ASGD, lr=1.0) as optimizer:
        with optimizer.accumulating():
            layer(torch.ones(1, 50)).sum().backward()
        layer(torch.ones(1, 50)).sum().backward()
        with pytest.raises(ConfigurationError, match="accumulating"):
            layer(torch.ones(1, 50)).sum().backward()
        optimizer.zero_grad()  # skips the batch; what was handed over is carried
        layer(torch.ones(1, 50)).sum().backward()
        optimizer.step()
        optimizer.pull()
        moved = layer.weight.detach()[0, 0].item()
        assert moved in (-3.0, -4.0), "the second one may have been added before the first was looked at"


def test_accumulated_gradients_are_summed(server):
    layer = linear()
    with overlapping(layer, server, psclient.ASGD, lr=1.0) as optimizer:
        for _ in range(2):
            with optimizer.accumulating():
                layer(torch.ones(1, 50)).sum().backward()
            layer(torch.ones(1, 50)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.pull()
        assert torch.equal(layer.weight.detach(), torch.full((1, 50), -4.0))


def test_a_gradient_that_is_not_finite_stops_the_step_and_the_next_one_works(server):
    model = make_model(batch_norm=False)
    with overlapping(model, server) as optimizer:
        train_step(model, optimizer, *make_data())
        with pytest.raises(NonFiniteGradientError):
            train_step(model, optimizer, torch.full((4, 20), float("nan")), torch.zeros(4, dtype=torch.int64))
        losses = [train_step(model, optimizer, *make_data()) for _ in range(20)]
        assert losses[-1] < losses[0]
        optimizer.pull()
        assert_same_parameters(model, server.server)
        assert all(bool(s["residual"].isfinite().all()) for s in optimizer.state.values())


HASTY = {"patience_seconds": 8}  # of an exchange that was under way already when the server has stopped


def test_a_server_that_stops_for_a_while_loses_and_doubles_nothing():
    settings = QUICK.model_copy(update={"bucket_bytes": 1} | HASTY)
    layer, total, failures = linear(1000), torch.zeros(1, 1000), 0
    with (
        LocalServer(down_mode="exact", lease_seconds=60) as server,
        overlapping(layer, server, psclient.GradientDropping, lr=1.0, settings=settings) as optimizer,
    ):
        for step in range(12):
            if step == 4:
                stop(server, optimizer)
            if step == 8:
                go_on(server, optimizer)
            x, before = torch.randn(1, 1000), engine_of(optimizer).number
            layer(x).sum().backward()
            try:
                optimizer.step()
            except ServerUnreachableError:
                failures += 1
            if engine_of(optimizer).number > before:
                total += x
            optimizer.zero_grad()
        optimizer.pull()
        assert failures
        held = optimizer.state[layer.weight]["residual"].view(1, -1)
        torch.testing.assert_close(total, held - layer.weight.detach(), rtol=1e-4, atol=1e-4)
        assert_same_parameters(layer, server.server)


def test_a_state_dict_and_a_flush_wait_for_what_is_under_way(server):
    model = make_model(batch_norm=False)
    with overlapping(model, server) as optimizer:
        for _ in range(3):
            train_step(model, optimizer, *make_data())
        mark = optimizer.state_dict()["param_groups"][0]["psclient"]
        assert mark["acknowledged_step"] == mark["step"] == 3
        assert optimizer.version == 3
        train_step(model, optimizer, *make_data())
        optimizer.flush()
        optimizer.pull()
        assert_same_parameters(model, server.server)


def test_a_push_that_was_begun_is_taken_back_by_a_flush_between_backward_and_step(server):
    layer = linear()
    with overlapping(layer, server, psclient.GradientDropping, lr=1.0) as optimizer:
        layer(torch.ones(1, 50)).sum().backward()
        optimizer.flush()
        optimizer.pull()
        assert torch.equal(layer.weight.detach(), torch.full((1, 50), -1.0))
        optimizer.step()
        optimizer.pull()
        assert torch.equal(layer.weight.detach(), torch.full((1, 50), -1.0)), "the gradient counts once"


def test_what_does_not_go_together_is_said(server):
    model = make_model(batch_norm=False)
    with pytest.raises(ConfigurationError, match="clip_norm"):
        overlapping(model, server, psclient.DGC, clip_norm=1.0)
    with overlapping(model, server) as optimizer:
        nn.functional.cross_entropy(model(make_data()[0]), make_data()[1]).backward()
        with pytest.raises(ConfigurationError, match="samples"):
            optimizer.step(samples=5)
        optimizer.step()


@pytest.mark.long
def test_several_workers_overlap_against_one_server():
    with LocalServer(down_mode="auto") as server:
        models = [make_model(i, batch_norm=False) for i in range(3)]
        optimizers = [overlapping(m, server, worker=f"w{i}", momentum=0.3) for i, m in enumerate(models)]
        for _ in range(30):
            losses = [train_step(m, o, *make_data()) for m, o in zip(models, optimizers, strict=True)]
        assert max(losses) < 1.0
        for optimizer in optimizers:
            optimizer.pull()
            optimizer.close()
        assert psclient.download(server.server)


def test_a_gradient_that_is_changed_after_backward_is_refused(server):
    model = make_model(batch_norm=False)
    with overlapping(model, server) as optimizer:
        nn.functional.cross_entropy(model(make_data()[0]), make_data()[1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(ConfigurationError, match="clipping"):
            optimizer.step()
        train_step(model, optimizer, *make_data())
        optimizer.pull()
        assert_same_parameters(model, server.server)


def test_a_parameter_that_is_thawed_later_trains(server):
    model = nn.Sequential(linear(), nn.Linear(1, 1, bias=False))
    model[1].weight.requires_grad_(False)
    settings = EAGER.model_copy(update={"bucket_bytes": 4000, "upload_frozen": True})  # both in one group
    with overlapping(model, server, psclient.ASGD, lr=1.0, settings=settings) as optimizer:
        before = model[1].weight.detach().clone()
        for thawed in (False, True, True):
            model[1].weight.requires_grad_(thawed)
            model(torch.ones(1, 50)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.pull()
        assert not torch.equal(model[1].weight, before)


def test_what_could_not_be_sent_is_sent_by_the_step_after_a_pull_that_failed():
    settings = QUICK.model_copy(update={"bucket_bytes": 1} | HASTY)
    layer, total = linear(100), torch.zeros(1, 100)
    with (
        LocalServer(down_mode="exact", lease_seconds=60) as server,
        overlapping(layer, server, psclient.GradientDropping, lr=1.0, settings=settings) as optimizer,
    ):
        for step in range(3):
            if step == 1:
                stop(server, optimizer)
            x, before = torch.randn(1, 100), engine_of(optimizer).number
            layer(x).sum().backward()
            if step == 2:
                with pytest.raises(ServerUnreachableError):
                    optimizer.pull()
                go_on(server, optimizer)
            with contextlib.suppress(ServerUnreachableError):
                optimizer.step()
            if engine_of(optimizer).number > before:
                total += x
            assert step < 2 or engine_of(optimizer).number > before
            optimizer.zero_grad()
        optimizer.pull()
        held = optimizer.state[layer.weight]["residual"].view(1, -1)
        torch.testing.assert_close(total, held - layer.weight.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rounds", [None, psclient.Rounds()], ids=["asynchronous", "rounds"])
@pytest.mark.parametrize("overlap", long_but([True], [False, True]))
def test_a_step_that_is_called_again_pushes_its_gradient_once(overlap, rounds):
    layer = linear()
    with (
        LocalServer(down_mode="exact", lease_seconds=60) as server,
        overlapping(layer, server, psclient.ASGD, lr=1.0, settings=QUICK, overlap=overlap, rounds=rounds) as optimizer,
    ):
        for step in range(4):
            layer(torch.ones(1, 50)).sum().backward()
            if step == 2:
                stop(server, optimizer)
            try:
                optimizer.step()
            except ServerUnreachableError:
                go_on(server, optimizer)
                optimizer.step()
            optimizer.zero_grad()
        optimizer.pull()
        assert torch.equal(layer.weight.detach(), torch.full((1, 50), -4.0))


def test_closing_does_not_wait_for_a_server_that_hangs():
    layer = linear()
    with LocalServer(down_mode="exact", lease_seconds=60) as server:
        optimizer = overlapping(layer, server, psclient.ASGD, lr=1.0, settings=ClientSettings())
        for stopped in (False, True):
            if stopped:
                suspend(server.processes[0].pid)
            layer(torch.ones(1, 50)).sum().backward()
            if not stopped:
                optimizer.step()
        started = time.monotonic()
        optimizer.close()
        assert time.monotonic() - started < 25
        os.kill(server.processes[0].pid, signal.SIGCONT)


def test_a_run_that_ends_during_a_step_ends_the_loop_and_raises_nothing():
    layer, seen = linear(), threading.Event()
    with (
        LocalServer(down_mode="exact", end_versions=1) as server,
        overlapping(layer, server, psclient.GradientDropping, lr=1.0) as optimizer,
    ):
        await_ack = engine_of(optimizer).await_ack
        engine_of(optimizer).await_ack = lambda report: (seen.wait(30), await_ack(report))[1]
        layer(torch.ones(1, 50)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not optimizer.finished  # so the loop goes on
        layer(torch.ones(1, 50)).sum().backward()
        seen.set()
        wait_until(lambda: optimizer.finished)
        optimizer.step()
        assert optimizer.finished
        with pytest.raises(RunFinishedError):
            optimizer.step()
        optimizer.pull()
        assert_same_parameters(layer, server.server)
        held = optimizer.state[layer.weight]["residual"].sum() - layer.weight.detach().sum()
        assert held == 100, "what the run did not take is in the residual"
