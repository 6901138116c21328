"""An engine whose commit failed half-way gets everything from its directory, and few bytes from the server."""

import os
from contextlib import contextmanager

import pytest
import torch

import psclient
from psclient import Follower, LocalServer, PatchSink
from tests.system.following.following_tools import READING, SECONDS, SleepyEngine, loaded, parameters_of, same
from tests.system.line import Line
from tests.system.tools import QUICK, wait_until
from tests.tiers import long_but

SHAPE = (400, 300)


class Run:
    """A worker that changes a hundredth of its model at a time, and a line that counts what readers get."""

    def __init__(self, server, line):
        self.server, self.line, self.model = server, line, torch.nn.Linear(*SHAPE)
        self.whole_bytes = sum(parameter.nbytes for parameter in self.model.parameters())
        self.optimizer = psclient.GradientDropping(
            self.model.parameters(), lr=0.1, model=self.model, server=server, settings=QUICK, density=0.01
        )

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(8, SHAPE[0])).pow(2).sum().backward()
        self.optimizer.step()
        return self.optimizer.version

    def expected(self, dtype=torch.float32):
        return {name: value.to(dtype) for name, value in parameters_of(self.model).items()}


@contextmanager
def running():
    with LocalServer(cut_seconds=0.01) as server, Line(server.addresses[0]) as line:
        run = Run(server, line)
        with run.optimizer:
            yield run


@pytest.mark.parametrize("dtype", long_but([torch.bfloat16], [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("fails_at", [{2}, {2, 3, 4}])
def test_an_engine_is_restored_from_its_directory(tmp_path, dtype, fails_at):
    engine, told = SleepyEngine(fails_at), []
    with running() as run:
        sink = PatchSink(engine, dtype, tmp_path)
        with Follower(run.line.address, sink, READING, on_cut=lambda cut: told.append(cut.version)) as follower:
            follower.wait_for(0, SECONDS)
            had, version = run.line.down, run.step()
            wait_until(lambda: follower.ready and follower.version == version, SECONDS)
            wait_until(lambda: told == [0, version], SECONDS)
            assert engine.commits == 2 + len(fails_at)
            assert same(engine.tensors, run.expected(dtype))
            assert run.line.down - had < run.whole_bytes / 8
            version = run.step()  # and a difference comes after that
            follower.wait_for(version, SECONDS)
            assert engine.commits == 3 + len(fails_at)
            assert same(engine.tensors, run.expected(dtype))
            assert run.line.down - had < run.whole_bytes / 8
        assert same(loaded(tmp_path)[1], run.expected(dtype))


def test_it_is_not_ready_while_it_holds_a_mixture(tmp_path):
    engine, ready = SleepyEngine({2, 3}), []
    with running() as run, Follower(run.server, PatchSink(engine, directory=tmp_path), READING) as follower:
        follower.wait_for(0, SECONDS)
        real = engine.stage

        def stage(cut, patches):
            ready.append(follower.ready)
            real(cut, patches)

        engine.stage = stage
        follower.wait_for(run.step(), SECONDS)
        assert ready == [True, False, False]  # before the failure, and when all was handed over, twice


def damage(path):
    for file in path.glob("model-*.safetensors"):
        with file.open("r+b") as opened:
            opened.seek(-1, os.SEEK_END)
            last = opened.read(1)[0]
            opened.seek(-1, os.SEEK_END)
            opened.write(bytes([last ^ 1]))


def remove(path):
    for file in path.glob("model*"):
        file.unlink()


@pytest.mark.parametrize("harm", [damage, remove])
def test_from_a_directory_that_is_not_whole_nothing_is_taken(tmp_path, harm):
    engine = SleepyEngine({2})
    with running() as run, Follower(run.line.address, PatchSink(engine, directory=tmp_path), READING) as follower:
        follower.wait_for(0, SECONDS)
        real, had = engine.commit, run.line.down

        def commit(cut):
            try:
                real(cut)
            except RuntimeError:
                harm(tmp_path)
                raise

        engine.commit = commit
        version = run.step()
        wait_until(lambda: follower.ready and follower.version == version, SECONDS)
        assert engine.commits == 3
        assert same(engine.tensors, run.expected())
        assert run.line.down - had > run.whole_bytes
        assert same(loaded(tmp_path)[1], run.expected())  # and it is whole again


def test_a_new_engine_begins_with_the_directory_and_fetches_what_has_changed_since(tmp_path):
    with running() as run:
        with Follower(run.server, PatchSink(SleepyEngine(), directory=tmp_path), READING) as follower:
            follower.wait_for(run.step(), SECONDS)
        version, engine, had = run.step(), SleepyEngine(), run.line.down
        with Follower(run.line.address, PatchSink(engine, directory=tmp_path), READING) as follower:
            follower.wait_for(version, SECONDS)
            assert engine.commits == 2
            assert same(engine.tensors, run.expected())
            assert run.line.down - had < run.whole_bytes / 8


def test_a_version_that_is_found_is_told_once(tmp_path):
    with running() as run:
        version = run.step()
        for _ in range(2):  # the first is fetched, the second found
            engine, told = SleepyEngine(), []
            sink = PatchSink(engine, directory=tmp_path)
            with Follower(run.server, sink, READING, on_cut=told.append) as follower:
                follower.wait_for(version, SECONDS)
                wait_until(lambda told=told: len(told) > 0, SECONDS)
                assert (told, engine.commits) == ([follower.cut], 1)


def test_a_directory_that_cannot_be_committed_leaves_the_engine_as_it_is(tmp_path, monkeypatch):
    engine, aborted = SleepyEngine(), []
    sink, real = PatchSink(engine, directory=tmp_path), engine.abort
    engine.abort = lambda: aborted.append(len(engine.staged)) or real()
    with running() as run, Follower(run.server, sink, READING) as follower:
        follower.wait_for(0, SECONDS)
        before = run.expected()
        with monkeypatch.context() as patch:
            patch.setattr(sink._copy, "commit", lambda: (_ for _ in ()).throw(OSError(28, "No space left")))
            version = run.step()
            wait_until(lambda: isinstance(follower.error, OSError), SECONDS)
            assert follower.version == 0
            assert same(engine.tensors, before)
            assert aborted[0] > 0
        follower.wait_for(version, SECONDS)
        assert same(engine.tensors, run.expected())
