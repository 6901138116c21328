"""Joining over lines on which a model takes far longer than a lease, stands still, or is cut."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import psclient
from psclient.engine.home import OneProcess
from psclient.errors import ServerUnreachableError
from psclient.rpc.local_server import LocalServer
from tests.system.connecting.test_installing import slow  # noqa: F401
from tests.system.line import Line
from tests.system.operating.asking import metric, status
from tests.system.tools import QUICK, assert_same_parameters, wait_until
from tests.tiers import long_but

RATE = 200_000.0  # bytes a second
LEASE = 2.5  # seconds, in which a third of the model goes at most
TIMEOUT = 60.0
MODEL_BYTES = 4 * 400_500


def big_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(800, 500))


def join(model, address, worker="w0", **settings):
    limits = QUICK.model_copy(update=settings)
    return psclient.GradientDropping(
        model.parameters(), lr=0.1, density=1e-4, model=model, server=address, worker=worker, settings=limits
    )


@pytest.fixture
def served(tmp_path):
    path = tmp_path / "log"
    with path.open("w") as log, LocalServer(lease_seconds=LEASE, log_to=log, log_level="info") as server:
        server.log = path
        yield server


def held(server):
    """Bytes of the unfinished upload that the server holds."""
    return metric(server, "psservice_bytes_in_flight")


def test_an_upload_that_takes_many_leases_ends_no_lease(served):
    with Line(served.server, RATE) as line, join(big_model(), line.address) as optimizer:
        assert optimizer.version == 0
        assert optimizer.totals.upload_bytes < 1.01 * MODEL_BYTES  # once
    log = served.log.read_text()
    assert "taken for dead" not in log
    assert log.count("worker joined") == 1


def test_whoever_waits_waits_as_long_as_the_upload_gets_on_and_says_so(served, caplog):
    """Far longer than it would wait for a model of which it hears nothing."""
    caplog.set_level(logging.INFO, "psclient")
    first, second = big_model(), big_model(1)
    with Line(served.server, RATE) as line, ThreadPoolExecutor(1) as pool:
        uploading = pool.submit(join, first, line.address)
        wait_until(lambda: line.up > MODEL_BYTES / 10)
        with join(second, served.server, "w1", connect_seconds=3.0) as waited, uploading.result(TIMEOUT) as uploader:
            waited.pull()
            assert_same_parameters(second, served.server)
            assert uploader.totals.upload_bytes < 1.01 * MODEL_BYTES
            assert waited.totals.upload_bytes == 0
    assert "w0 uploads the model: " in caplog.text
    assert served.log.read_text().count("worker joined") == 2


def test_an_upload_that_is_cut_goes_on_where_it_was(served):
    model = big_model()
    with Line(served.server) as line, ThreadPoolExecutor(1) as pool:
        line.stop_at("up", MODEL_BYTES // 2)
        joining = pool.submit(join, model, line.address)
        wait_until(lambda: held(served) > MODEL_BYTES // 3)
        line.reset()
        line.go_on()
        with joining.result(TIMEOUT) as optimizer:
            assert line.up < 1.4 * MODEL_BYTES
            assert_same_parameters(model, served.server)
            assert optimizer.version == 0


def test_a_line_that_is_silent_for_longer_than_a_lease_loses_nothing_of_an_upload(served):
    model = big_model()
    with Line(served.server) as line, ThreadPoolExecutor(1) as pool:
        line.stop_at("up", MODEL_BYTES // 2)
        joining = pool.submit(join, model, line.address, deadline_seconds=1.0)
        wait_until(lambda: "taken for dead" in served.log.read_text())
        line.reset()
        line.go_on()
        with joining.result(TIMEOUT):
            assert line.up < 1.4 * MODEL_BYTES
            assert_same_parameters(model, served.server)


@pytest.mark.long
def test_nor_does_one_to_several_shards_of_which_one_has_its_part_already(tmp_path):
    model, path = big_model(), tmp_path / "log"
    with (
        path.open("w") as log,
        LocalServer(2, lease_seconds=LEASE, log_to=log, log_level="info") as server,
        Line(server.addresses[0]) as first,
        Line(server.addresses[1]) as second,
        ThreadPoolExecutor(1) as pool,
    ):
        first.stop_at("up", MODEL_BYTES // 4)  # half of its part, which goes when the second has its own
        joining = pool.submit(join, model, f"{first.address},{second.address}", deadline_seconds=1.0)
        wait_until(lambda: first.up >= MODEL_BYTES // 4)
        second.stop_at("up", second.up)
        wait_until(lambda: path.read_text().count("taken for dead") == 2)
        for line in (first, second):
            line.reset()
            line.go_on()
        with joining.result(TIMEOUT) as optimizer:
            assert second.up < 0.6 * MODEL_BYTES
            assert first.up < 0.7 * MODEL_BYTES
            assert optimizer.version == 0
            assert_same_parameters(model, server.server)


def test_the_upload_moves_on_when_its_worker_lives_and_sends_nothing(tmp_path):
    """A worker that is held in a debugger, say: its leases are renewed in a thread of their own."""
    with (
        LocalServer(lease_seconds=LEASE, stream_idle_seconds=1.0) as server,
        Line(server.server) as line,
        ThreadPoolExecutor(1) as pool,
    ):
        hangs = threading.Event()
        stuck, quick = big_model(), big_model(1)
        stuck[0].register_parameter("late", nn.Parameter(torch.zeros(1)))
        quick[0].register_parameter("late", nn.Parameter(torch.zeros(1)))
        held = pool.submit(held_up_join, stuck, line.address, hangs)
        wait_until(lambda: len(status(server).workers) == 1)
        with join(quick, server.server, "w1") as optimizer:
            assert optimizer.totals.upload_bytes > MODEL_BYTES
            hangs.set()
            with held.result(TIMEOUT) as other:
                other.pull()
                assert_same_parameters(stuck, server.server)


def held_up_join(model, address, hangs):
    from psclient.model.replica import Replica

    class Slow(Replica):
        def read(self, span):
            if self.parameters[0] is model[0].weight:
                assert hangs.wait(TIMEOUT)
            yield from super().read(span)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("psclient.engine.home.Replica", Slow)
        return join(model, address)


@pytest.mark.parametrize("spills", long_but([True], [False, True]))
def test_a_late_joiners_download_that_is_cut_goes_on_where_it_was(spills, monkeypatch):
    """Also if what has come is written at once, as for several ranks that are one worker."""
    if spills:
        monkeypatch.setattr(OneProcess, "spill", property(lambda home: home.replica.write))
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(2000, 3000))  # 24 MB: a few times what is checked at a time
    nbytes = 4 * sum(p.numel() for p in wide.parameters())
    torch.manual_seed(1)
    late = nn.Sequential(nn.Linear(2000, 3000))
    with (
        LocalServer() as server,
        join(wide, server.server) as first,
        Line(server.server) as line,
        ThreadPoolExecutor(1) as pool,
    ):
        line.stop_at("down", nbytes // 2)
        joining = pool.submit(join, late, line.address, "late")
        wait_until(lambda: line.down >= nbytes // 2)
        for parameter in wide.parameters():
            parameter.grad = torch.zeros_like(parameter)
        wide[0].weight.grad[5, 5] = wide[0].bias.grad[7] = 1.0
        first.step()  # before and behind the place of the cut
        line.reset()
        line.go_on()
        with joining.result(TIMEOUT):
            assert line.down < 1.4 * nbytes
            assert_same_parameters(wide, server.server)
            assert_same_parameters(late, server.server)


def test_an_upload_waits_for_a_slow_disk_as_long_as_the_server_is_at_work(slow, tmp_path, caplog):  # noqa: F811
    model = big_model()
    slow.touch()
    with LocalServer(data_dir=tmp_path / "data", lease_seconds=LEASE) as server, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join, model, server.server, deadline_seconds=2.0)
        wait_until(slow.with_suffix(".met").exists)
        end = time.monotonic() + 6.0  # three deadlines, each many times what a server is silent for on a busy machine
        wait_until(lambda: time.monotonic() > end)
        slow.unlink()
        with joining.result(TIMEOUT) as optimizer:
            assert optimizer.totals.upload_bytes < 1.01 * MODEL_BYTES
            optimizer.pull()
            assert optimizer.totals.pull_bytes < 1000
    assert "nothing has moved" not in caplog.text


def test_a_model_whose_answer_is_lost_is_not_fetched_again(slow, tmp_path):  # noqa: F811
    model = big_model()
    slow.touch()
    with (
        LocalServer(data_dir=tmp_path / "data") as server,
        Line(server.server) as line,
        ThreadPoolExecutor(1) as pool,
    ):
        joining = pool.submit(join, model, line.address)
        wait_until(slow.with_suffix(".met").exists)
        line.reset()
        slow.unlink()
        with joining.result(TIMEOUT) as optimizer:
            assert line.down < MODEL_BYTES / 10
            assert optimizer.version == 0
            assert_same_parameters(model, server.server)


@pytest.mark.long
def test_a_push_takes_as_long_as_its_bytes_move():
    """And is not cut at its deadline, to be sent again."""
    model = big_model()
    limits = QUICK.model_copy(update={"deadline_seconds": 3.0})
    with (
        LocalServer(chunk_bytes=64 << 10, lease_seconds=LEASE) as server,
        Line(server.server) as line,
        psclient.ASGD(model.parameters(), lr=0.1, model=model, server=line.address, settings=limits) as optimizer,
    ):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        line.rate, before = RATE, line.up
        optimizer.step()  # eight seconds up, eight down
        assert optimizer.version == 1
        assert line.up - before < 1.1 * MODEL_BYTES
        assert line.down < 1.1 * MODEL_BYTES
        line.rate = 0.0


def test_a_push_on_a_dead_line_is_given_up():
    model = big_model()
    limits = QUICK.model_copy(update={"deadline_seconds": 0.5, "patience_seconds": 1.0})
    with (
        LocalServer() as server,
        Line(server.server) as line,
        psclient.ASGD(model.parameters(), lr=0.1, model=model, server=line.address, settings=limits) as optimizer,
    ):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        line.stop_at("up", line.up + MODEL_BYTES // 2)
        with pytest.raises(ServerUnreachableError, match="nothing has moved"):
            optimizer.step()
        line.reset()
        line.go_on()
        optimizer.step()
        assert optimizer.version in (1, 2)  # what was given up is in the next one where it did not arrive
