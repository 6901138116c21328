"""A follower that nobody refers to any more ends, whatever it does at that moment and wherever it is collected."""

import gc
import logging
import threading
import weakref
from functools import partial

import grpc
import pytest
import torch

import psclient
from psclient import DirectorySink, Follower, LocalServer
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from tests.system.following.following_tools import READING, SECONDS, loaded, parameters_of, same, training
from tests.system.line import Line
from tests.system.tools import make_model, wait_until
from tests.tiers import long_but


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("psclient-follow")]


def wait_for_end(following):
    """Wait until the follower's threads have ended and all that they worked with is gone.

    The collector runs again and again: the follower's thread may have been inside of its sink or its callback before.
    """
    wait_until(lambda: gc.collect() >= 0 and not threads() and following() is None, SECONDS)


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, "psclient")  # a record that is kept has an error's frames


@pytest.fixture
def run():
    wait_until(lambda: gc.collect() >= 0 and not threads(), SECONDS)
    with LocalServer(shards=2, cut_seconds=0.01) as server, training(server) as found:
        found.server = server
        found.steps()
        yield found


def readers(server):
    with grpc.insecure_channel(server.addresses[0]) as channel:
        status = ParameterServerServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=SECONDS)
    return [each.reader for each in status.readers]


class Engine:
    """Keeps its follower, as objects of programs do; each commit fails if it is told so."""

    def __init__(self, fails):
        self.fails, self.failures, self.follower = fails, 0, None

    def stage(self, cut, patches):
        pass

    def commit(self, cut):
        if self.fails:
            self.failures += 1
            raise RuntimeError("asleep")

    def abort(self):
        pass


def test_a_dropped_follower_ends_signs_off_and_closes_its_connections(run):
    module = make_model(1)
    follower = psclient.follow(run.server, module, settings=READING, name="evaluation")
    follower.wait_for(1, SECONDS)
    assert readers(run.server) == ["evaluation"]
    connections, following = [*follower._following._connections], weakref.ref(follower._following)
    assert len(connections) == 2
    del follower
    wait_for_end(following)
    assert all(connection._closed for connection in connections)
    assert readers(run.server) == []
    assert same(parameters_of(module), run.versions[1])


def note(engine, seen, cut):
    seen.append(engine.follower.cut == cut)


@pytest.mark.parametrize("fails", long_but([True], [False, True]))
def test_what_its_sink_and_its_callback_refer_to_does_not_keep_it(run, fails):
    engine, seen = Engine(fails), []
    engine.follower = Follower(run.server, engine, READING, on_cut=partial(note, engine, seen))
    wait_until(lambda engine=engine: engine.failures > 1 or len(seen) > 0, SECONDS)
    following, kept = weakref.ref(engine.follower._following), weakref.ref(engine)
    del engine
    wait_for_end(following)
    wait_until(lambda: gc.collect() >= 0 and kept() is None, SECONDS)
    assert readers(run.server) == []


@pytest.mark.parametrize("is_cycle", long_but([True], [False, True]))
def test_it_may_be_dropped_in_its_own_thread(run, is_cycle):
    kept, dropped = [], threading.Event()

    def drop(cut):
        if kept:
            kept.clear()
            gc.collect()
            dropped.set()

    kept.append(psclient.follow(run.server, make_model(1), settings=READING, on_cut=drop))
    if is_cycle:
        kept[0].itself = kept[0]
    following = weakref.ref(kept[0]._following)
    run.steps()
    assert dropped.wait(SECONDS)
    wait_for_end(following)
    assert readers(run.server) == []


@pytest.mark.long
def test_a_transfer_ends_with_its_follower():
    model, module = torch.nn.Linear(400, 300), torch.nn.Linear(400, 300)
    half, before = 2 * 300 * 401, parameters_of(module)
    with (
        LocalServer() as server,
        psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server),
        Line(server.addresses[0]) as line,
    ):
        line.stop_at("down", half)
        follower = psclient.follow(line.address, module, settings=READING)
        wait_until(lambda: line.down >= half, SECONDS)
        following = weakref.ref(follower._following)
        del follower
        wait_for_end(following)
    assert same(parameters_of(module), before)


def test_one_that_never_had_an_answer_ends(tmp_path):
    follower = Follower("localhost:1", DirectorySink(tmp_path), READING)
    wait_until(lambda follower=follower: follower.error is not None, SECONDS)
    following = weakref.ref(follower._following)
    del follower
    wait_for_end(following)


def test_a_directory_is_free_for_the_next_follower(run, tmp_path):
    follower = Follower(run.server, DirectorySink(tmp_path), READING)
    follower.wait_for(1, SECONDS)
    following = weakref.ref(follower._following)
    del follower
    wait_for_end(following)
    with Follower(run.server, DirectorySink(tmp_path), READING) as other:
        other.wait_for(run.steps(), SECONDS)
        assert loaded(tmp_path)[0]["version"] == 2


def test_it_lives_as_long_as_somebody_holds_it(run):
    module = make_model(1)
    with psclient.follow(run.server, module, settings=READING).hold(SECONDS) as cut:
        gc.collect()
        assert threads()
        assert same(parameters_of(module), run.versions[cut.version])
    wait_until(lambda: gc.collect() >= 0 and not threads(), SECONDS)


def test_a_closed_follower_leaves_nothing_to_end(run):
    follower = psclient.follow(run.server, make_model(1), settings=READING)
    follower.wait_for(1, SECONDS)
    follower.close()
    wait_until(lambda: gc.collect() >= 0 and not threads(), SECONDS)
    following = weakref.ref(follower._following)
    del follower
    wait_for_end(following)
