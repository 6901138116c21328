"""An optimizer that nobody closes: when it is collected, its worker leaves and nothing of it stays behind."""

import gc
import signal
import threading
import weakref

import pytest
import torch

import psclient
from psclient.rpc.local_server import LocalServer
from tests.system.operating.asking import worker_ids
from tests.system.tools import QUICK, make_data, make_model, own_server, train_step, wait_until
from tests.tiers import long_but


def dgs(model, **options):
    return psclient.DGS(model.parameters(), lr=0.1, momentum=0.3, density=0.1, model=model, settings=QUICK, **options)


def our_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("psclient")}


@pytest.fixture(autouse=True)
def little_of_other_tests():
    """What tests before these have forgotten is collected; each test compares with what is left then."""
    gc.collect()


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("shards", long_but([2], [1, 2]))
def test_its_worker_leaves_and_its_threads_end(shards, overlap):
    with LocalServer(shards=shards, lease_seconds=60) as server:
        threads, handler = our_threads(), signal.getsignal(signal.SIGTERM)
        model = make_model()
        optimizer = dgs(model, server=server, worker="w", overlap=overlap)
        for _ in range(3):
            train_step(model, optimizer, *make_data())
        assert worker_ids(server) == ["w"]
        assert our_threads() > threads
        parts = [weakref.ref(optimizer), weakref.ref(model)]
        del optimizer, model
        gc.collect()
        assert signal.getsignal(signal.SIGTERM) == handler
        wait_until(lambda: not any(map(worker_ids, server.addresses)))
        wait_until(lambda: our_threads() <= threads)
        gc.collect()
        assert [part() for part in parts] == [None, None], "nothing keeps the model's memory"


def test_no_collector_is_needed():
    with LocalServer(lease_seconds=60) as server:
        model = make_model()
        gc.disable()
        try:
            optimizer = dgs(model, server=server, worker="w")
            train_step(model, optimizer, *make_data())
            del optimizer
            wait_until(lambda: not worker_ids(server))
        finally:
            gc.enable()


class Own(torch.nn.Sequential):
    """A class that no other test's optimizer counts."""


def test_the_class_of_its_model_is_as_it_was():
    with LocalServer() as server:
        model = Own(*make_model())
        optimizer = dgs(model, server=server)
        train_step(model, optimizer, *make_data())
        assert "__call__" in vars(Own)
        del optimizer
        gc.collect()
        wait_until(lambda: "__call__" not in vars(Own))


def test_its_embedded_server_stops():
    model = make_model()
    optimizer = dgs(model)
    (process,) = own_server(optimizer).processes
    train_step(model, optimizer, *make_data())
    del optimizer
    gc.collect()
    wait_until(lambda: process.poll() is not None)


def test_a_finished_run_ends_on_every_shard(tmp_path):
    """As with close(): a shard beside the coordinator hears of the end from a worker."""
    final = tmp_path / "model.safetensors"
    with LocalServer(shards=2, end_versions=2, final_model=final) as server:
        model = make_model()
        optimizer = dgs(model, server=server)
        while not optimizer.finished:
            train_step(model, optimizer, *make_data())
        del optimizer
        gc.collect()
        wait_until(lambda: len(list(tmp_path.glob("*.safetensors"))) == 2)


def test_where_no_server_is_left_its_threads_end_all_the_same():
    threads = our_threads()
    with LocalServer() as server:
        model = make_model()
        optimizer = dgs(model, server=server)
        train_step(model, optimizer, *make_data())
        server.processes[0].kill()
        server.processes[0].wait(30)
        del optimizer
        gc.collect()
        wait_until(lambda: our_threads() <= threads)
