"""How a worker begins and ends with its servers where something is wrong: soon, in order, and nothing is left over."""

import os
import random
import signal
import subprocess
import sys
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch
import trustme

import psclient
from psclient.errors import ConfigurationError, HandshakeError, SparsepsError
from psclient.rpc import local_server
from psclient.rpc.local_server import LocalServer
from psclient.rpc.run import Run
from psclient.settings import ClientSettings
from tests.system.connecting.test_secured import issue
from tests.system.operating.asking import status
from tests.system.tools import QUICK, make_data, make_model, run_of, suspend, train_step, wait_until

PATIENT = ClientSettings(connect_seconds=600, patience_seconds=600, deadline_seconds=600)
"""Whoever ends within a test's time limit has not waited for these."""


def dgs(model, server=None, **options):
    return psclient.DGS(model.parameters(), lr=0.05, momentum=0.5, density=0.05, model=model, server=server, **options)


# Permanent mistakes


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def secured(authority, directory):
    with LocalServer(**issue(authority, directory, "server")) as server:
        yield server


@pytest.fixture(scope="module")
def plain():
    with LocalServer() as server:
        yield server


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("mistake", "advice"),
    [
        ("another CA", "does not descend from the CA"),
        ("another name", "PSCLIENT_TLS_SERVER_NAME"),
        ("no CA", "name its CA"),
        ("a CA for plaintext", "does not speak TLS"),
        ("the metrics port", "metrics"),
    ],
)
def test_who_cannot_speak_with_a_server_hears_soon_what_to_change(mistake, advice, secured, plain, directory):
    trustme.CA().cert_pem.write_to_path(directory / "other.pem")
    ca, patience = directory / "ca.pem", {"connect_seconds": 600, "patience_seconds": 600}
    server, settings = {
        "another CA": (secured.server, {"tls_ca": directory / "other.pem"}),
        "another name": (secured.server, {"tls_ca": ca, "tls_server_name": "elsewhere"}),
        "no CA": (secured.server, {}),
        "a CA for plaintext": (plain.server, {"tls_ca": ca}),
        "the metrics port": (plain.metrics_addresses[0], {}),
    }[mistake]
    with pytest.raises(HandshakeError, match=advice):
        dgs(make_model(), server, settings=ClientSettings(**patience, **settings))


def test_a_worker_that_cannot_join_leaves_no_server_behind_and_the_programs_draws_as_they_were(monkeypatch, directory):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "unused.pem")
    started = []
    spawn = local_server.spawn
    monkeypatch.setattr(local_server, "spawn", lambda *given: started.append(spawn(*given)) or started[-1])
    random.seed(7)
    draws = random.getstate()
    settings = ClientSettings(server="local", connect_seconds=1, tls_ca=directory / "unused.pem")  # which has no TLS
    with pytest.raises(SparsepsError):
        dgs(make_model(), settings=settings)
    with pytest.raises(SparsepsError):
        dgs(make_model(), settings=settings.model_copy(update={"tls_ca": directory / "none.pem"}))
    assert [process.poll() for process in started] == [0, 0]
    assert random.getstate() == draws


# Another optimizer of the same worker


@pytest.mark.parametrize("overlap", [False, True])
def test_a_cell_that_is_run_again_takes_the_place_of_its_earlier_optimizer(overlap, caplog):
    with LocalServer(lease_seconds=600) as server:
        model = make_model()
        first = dgs(model, server, worker="w", settings=PATIENT, overlap=overlap)
        train_step(model, first, *make_data())
        again = dgs(model, server, worker="w", settings=PATIENT, overlap=overlap)
        train_step(model, again, *make_data())
        assert "was written to" not in caplog.text
        assert "earlier optimizer of this process is worker w" in caplog.text
        with pytest.raises(SparsepsError, match="has left its run"):
            train_step(model, first, *make_data())
        again.close()


def test_what_leaves_after_its_first_call_was_not_answered_leaves_no_lease(monkeypatch):
    with LocalServer(lease_seconds=600) as server:
        model = make_model()
        with monkeypatch.context() as patch:
            patch.setattr(Run, "_require_codecs", Mock(side_effect=KeyboardInterrupt))  # the answer is lost
            with pytest.raises(KeyboardInterrupt):
                dgs(model, server, worker="w", settings=PATIENT)
        wait_until(lambda: not status(server).workers)
        dgs(model, server, worker="w", settings=PATIENT).close()


def test_what_ends_before_its_first_call_has_nothing_to_leave(monkeypatch):
    with LocalServer(lease_seconds=600) as server:
        model = make_model()
        with monkeypatch.context() as patch:
            patch.setattr(Run, "join", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                dgs(model, server, worker="w", settings=PATIENT)
        assert not status(server).workers
        dgs(model, server, worker="w", settings=PATIENT).close()


@pytest.mark.timeout(60)
def test_a_forked_child_saves_the_state_and_does_not_load_one():
    with LocalServer() as server:
        model = make_model()
        optimizer = dgs(model, server)
        train_step(model, optimizer, *make_data())
        state = optimizer.state_dict()
        child = os.fork()
        if child == 0:
            same = optimizer.state_dict().keys() == state.keys()
            try:
                optimizer.load_state_dict(state)
            except ConfigurationError:
                os._exit(0 if same else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        optimizer.close()


def test_a_gradient_scaler_with_overlap_is_refused_and_nothing_was_unscaled():
    with LocalServer() as server:
        model = make_model()
        optimizer = dgs(model, server, overlap=True)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(2, 20)).sum()).backward()
        with pytest.raises(ConfigurationError, match="bf16"):
            scaler.step(optimizer)
        optimizer.close()


# SIGTERM and leaving

STUCK = """
import os, sys, torch, psclient, psclient.engine.lifecycle
from psclient.settings import ClientSettings
psclient.engine.lifecycle._GRACE_SECONDS = 3.0
patient = ClientSettings(connect_seconds=600, patience_seconds=600, deadline_seconds=600)
model = torch.nn.Linear(50, 2)
print("begun", flush=True)
optimizer = psclient.DGS(
    model.parameters(), lr=0.1, momentum=0.5, density=0.1, model=model, server=sys.argv[1], worker="w", settings=patient
)
sampler = psclient.ElasticSampler(10_000, optimizer, lease_samples=8)
print("joined", flush=True)
if sys.argv[2] == "samples":
    for _ in sampler.epochs(1):
        for _ in sampler:
            pass
while True:
    optimizer.zero_grad()
    model(torch.ones(1, 50)).sum().backward()
    optimizer.step()
"""


@contextmanager
def stuck(server, what):
    """A worker of a server that may be stopped in the body."""
    program = [sys.executable, "-c", STUCK, server.server, what]
    worker = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield worker
    finally:
        server.processes[0].send_signal(signal.SIGCONT)
        worker.kill()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", ["samples", "steps"])
def test_sigterm_ends_a_worker_that_waits_for_a_silent_server(what):
    with LocalServer(lease_seconds=600) as server, stuck(server, what) as worker:
        assert worker.stdout.readline() == "begun\n"
        assert worker.stdout.readline() == "joined\n"
        suspend(server.processes[0].pid)
        worker.send_signal(signal.SIGTERM)
        _, log = worker.communicate(timeout=40)
        assert worker.returncode == 143, log


@pytest.mark.timeout(60)
def test_sigterm_ends_a_worker_that_never_joined():
    with LocalServer() as server:
        suspend(server.processes[0].pid)
        with stuck(server, "steps") as worker:
            assert "does not answer" in worker.stderr.readline()
            worker.send_signal(signal.SIGTERM)
            _, log = worker.communicate(timeout=40)
            assert worker.returncode == 143, log


def test_leaving_tells_all_shards_before_it_waits_for_one(monkeypatch):
    begun, heard = [], []

    class Leave:
        def future(self, request, timeout):
            begun.append(self)
            return self

        def result(self):
            heard.append(len(begun))

        def cancel(self):
            pass

    with LocalServer(shards=3) as server:
        model = make_model()
        optimizer = dgs(model, server, settings=QUICK)
        train_step(model, optimizer, *make_data())
        for shard in run_of(optimizer).shards:
            monkeypatch.setattr(shard.connection.stub, "Leave", Leave())
        optimizer.close()
    assert heard == [3, 3, 3]
