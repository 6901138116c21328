"""Ctrl-C at the worst moments, and an optimizer that is dropped: nothing counts twice, and nothing lives on."""

import gc
import os
import signal
import threading
import weakref

import pytest
import torch

import psclient
from psclient.rpc.local_server import LocalServer
from tests.system.operating.asking import status
from tests.system.tools import QUICK, engine_of, go_on, local_steps, make_data, make_model, stop, train_step, wait_until
from tests.system.training.test_overlap import linear, overlapping

IN_PARTS = QUICK.model_copy(update={"bucket_bytes": 1})


def backward(layer):
    layer(torch.ones(1, 50)).sum().backward()


def moved(layer):
    return -layer.weight.detach()[0, 0].item()


def interrupt_and_wait_until(caught):
    """Send this process a SIGINT from another thread, and hold that thread until it has been seen.

    Again where it was not: an interrupt that falls into a callback of the garbage collector is swallowed there.
    """
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
        if caught.wait(15):
            return
    raise AssertionError("the interrupt was not seen")


@pytest.mark.parametrize("after", ["pull", "zero_grad", "step"])
def test_a_step_that_is_interrupted_behind_its_commit_counts_once(after):
    layer, caught = linear(), threading.Event()
    with LocalServer(down_mode="exact") as server, overlapping(layer, server, psclient.ASGD, lr=1.0) as optimizer:
        commit = engine_of(optimizer).commit

        def commit_and_interrupt(report):
            commit(report)
            wait_until(lambda: status(server).version == 1)
            interrupt_and_wait_until(caught)

        engine_of(optimizer).commit = commit_and_interrupt
        backward(layer)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        engine_of(optimizer).commit = commit
        caught.set()
        getattr(optimizer, after)()
        optimizer.zero_grad()
        backward(layer)
        optimizer.step()
        optimizer.pull()
        assert moved(layer) == 2


def test_a_step_that_is_interrupted_while_it_waits_for_a_reply_is_completed_by_calling_it_again():
    layer, waiting, caught = linear(), threading.Event(), threading.Event()
    with LocalServer(down_mode="exact") as server, overlapping(layer, server, psclient.ASGD, lr=1.0) as optimizer:
        fetch, collect = engine_of(optimizer).fetch, engine_of(optimizer).overlap.collect

        def fetch_late():
            assert waiting.wait(30)
            interrupt_and_wait_until(caught)
            return fetch()

        engine_of(optimizer).fetch = fetch_late
        backward(layer)
        optimizer.step()
        optimizer.zero_grad()
        engine_of(optimizer).overlap.collect = lambda seconds=None: (waiting.set(), collect(seconds))[1]
        backward(layer)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        engine_of(optimizer).fetch = fetch
        caught.set()
        optimizer.step()
        assert moved(layer) == optimizer.version == 2


@pytest.mark.parametrize("where", ["await_ack", "fetch", "apply"])
def test_a_step_that_ends_after_its_interrupt_is_not_taken_again_with_the_same_gradients(where):
    layer = linear()
    with (
        LocalServer(down_mode="exact") as server,
        psclient.ASGD(layer.parameters(), lr=1.0, model=layer, server=server.server, settings=QUICK) as optimizer,
    ):
        done = getattr(engine_of(optimizer), where)

        def interrupted(*given):
            setattr(engine_of(optimizer), where, done)
            os.kill(os.getpid(), signal.SIGINT)
            return done(*given)

        setattr(engine_of(optimizer), where, interrupted)
        backward(layer)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        optimizer.step()
        assert moved(layer) == optimizer.version == 1


def test_a_local_step_that_ends_after_its_interrupt_is_not_taken_again_with_the_same_gradients():
    layer = linear()
    inner = torch.optim.SGD(layer.parameters(), lr=1.0)
    take = inner.step
    with (
        LocalServer(down_mode="exact") as server,
        psclient.Outer(inner, sync_every=4, model=layer, server=server.server, settings=QUICK) as optimizer,
    ):
        inner.step = lambda: (os.kill(os.getpid(), signal.SIGINT), take())
        backward(layer)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        inner.step = take
        optimizer.step()
        assert moved(layer) == local_steps(optimizer) == 1


def test_an_optimizer_is_gone_without_a_collector_after_an_error_that_was_caught():
    layer = linear()
    with LocalServer(lease_seconds=600) as server:
        optimizer = psclient.ASGD(layer.parameters(), lr=1.0, model=layer, server=server.server, settings=QUICK)
        backward(layer)
        layer.weight.grad.fill_(torch.nan)
        gc.collect()
        gc.disable()
        try:
            with pytest.raises(psclient.errors.NonFiniteGradientError):
                optimizer.step()
            gone = weakref.ref(optimizer)
            del optimizer
            wait_until(lambda: gone() is None)
        finally:
            gc.enable()


@pytest.mark.parametrize("overlap", [False, True])
def test_differences_whose_adding_was_interrupted_are_not_added_twice(overlap):
    model = make_model(batch_norm=False)
    with (
        LocalServer(down_mode="topk", down_density=0.2, down_dense_below=0) as server,
        overlapping(model, server, overlap=overlap) as optimizer,
    ):
        for _ in range(4):
            train_step(model, optimizer, *make_data())
        replica = engine_of(optimizer).replica
        add = replica.add

        def add_and_interrupt(segments):
            add(segments)
            raise KeyboardInterrupt

        replica.add = add_and_interrupt
        with pytest.raises(KeyboardInterrupt):
            train_step(model, optimizer, *make_data())
        replica.add = add
        for _ in range(40):  # what a reply is too small for is owed
            optimizer.pull()
        state = psclient.download(server.server)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), state[name], rtol=0, atol=1e-6)


def test_a_push_in_doubt_has_one_patience_and_is_reported_once():
    layer = linear()
    with (
        LocalServer(down_mode="exact", lease_seconds=60) as server,
        overlapping(layer, server, psclient.ASGD, lr=1.0, settings=IN_PARTS) as optimizer,
    ):
        await_ack, awaited = engine_of(optimizer).await_ack, []
        engine_of(optimizer).await_ack = lambda report: (awaited.append(report), await_ack(report))[1]
        backward(layer)
        stop(server, optimizer)
        optimizer.step()  # its acknowledgement is awaited in the background
        optimizer.zero_grad()
        backward(layer)
        with pytest.raises(psclient.errors.ServerUnreachableError):
            optimizer.step()
        assert len(awaited) == 1, "it has been waited for in the background, for as long as it may"
        go_on(server, optimizer)
        optimizer.step()
        optimizer.pull()
        assert moved(layer) == 2


def test_an_optimizer_that_is_dropped_does_not_live_on():
    before = set(threading.enumerate())
    with LocalServer(lease_seconds=1.5) as server:
        model = make_model()
        optimizer = overlapping(model, server, worker="w", settings=QUICK)
        train_step(model, optimizer, *make_data())
        optimizer.pull()
        del optimizer
        gc.collect()
        wait_until(lambda: not status(server).workers)
        wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("psclient") and t not in before])
