"""An engine's versions are handed over whole, whenever its thread and the follower's meet."""

import threading
from types import SimpleNamespace

import pytest

from psclient.errors import FollowerNotReadyError
from psclient.integrations.handover import Handover
from psclient.reader.sink import CutDeclinedError
from pscore.reader.cut import Cut, ShardVersion
from tests.system.tools import wait_until

SECONDS = 60.0


def cut_of(version):
    return Cut("run", (ShardVersion(1, version, bytes(16)),))


def name_of(version):
    return cut_of(version).weight_version


class Engine:
    """An engine that notes which patches it has installed, and the follower's thread beside it."""

    def __init__(self):
        self.installed, self.refuses = [], set()
        self.may_install, self.is_installing = threading.Event(), threading.Event()
        self.may_install.set()
        self.follower = SimpleNamespace(is_over=False, error=None)
        self.handover = Handover(self._check, self._install)

    def _check(self, cut, patches):
        if self.refuses & {*patches}:
            raise FloatingPointError(f"{patches} cannot be taken")

    def _install(self, patches):
        self.is_installing.set()
        assert self.may_install.wait(SECONDS)
        self.installed.append(patches)

    def follow_to(self, version):
        """Do what a follower does with one version."""
        try:
            self.handover.stage(cut_of(version), [version])
            self.handover.commit(cut_of(version))
        except CutDeclinedError:
            self.handover.abort()

    def bring(self, version, seconds=SECONDS):
        return self.handover.bring(self.follower, name_of(version), seconds)


def in_thread(work, *arguments):
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def engine():
    """One that has version 1."""
    found = Engine()
    thread = in_thread(found.follow_to, 1)
    found.bring(1)
    thread.join(SECONDS)
    return found


def test_two_threads_that_bring_a_version_install_it_once(engine):
    engine.may_install.clear()
    engine.is_installing.clear()
    follower = in_thread(engine.follow_to, 2)
    found = []
    threads = [in_thread(lambda: found.append(engine.bring(2)))]
    assert engine.is_installing.wait(SECONDS)
    with pytest.raises(FollowerNotReadyError, match="another thread"):
        engine.bring(2, seconds=0.01)
    threads.append(in_thread(lambda: found.append(engine.bring(2))))
    engine.may_install.set()
    for thread in (*threads, follower):
        thread.join(SECONDS)
    assert found == [cut_of(2)] * 2
    assert engine.installed == [[1], [2]]
    assert engine.handover.held == cut_of(2)


def test_a_version_before_that_is_refused_meanwhile_does_not_end_the_wait(engine):
    engine.refuses.add(2)
    found = []
    bringing = in_thread(lambda: found.append(engine.bring(3)))
    wait_until(lambda: engine.handover._wanted == name_of(3), SECONDS)
    with pytest.raises(FloatingPointError):
        engine.follow_to(2)  # the follower had begun to fetch it
    bringing.join(0.5)  # longer than the engine takes to hear of that
    follower = in_thread(engine.follow_to, 3)
    bringing.join(SECONDS)
    follower.join(SECONDS)
    assert found == [cut_of(3)]


def test_a_version_that_is_about_to_be_committed_when_the_time_is_over_is_waited_for(engine):
    found = []
    bringing = in_thread(lambda: found.append(engine.bring(2, seconds=0.2)))
    wait_until(lambda: engine.handover._wanted == name_of(2), SECONDS)
    engine.handover.stage(cut_of(2), [2])
    bringing.join(1.0)  # longer than the engine waits for a version that is not here
    follower = in_thread(engine.handover.commit, cut_of(2))
    bringing.join(SECONDS)
    follower.join(SECONDS)
    assert found == [cut_of(2)]
    with pytest.raises(FollowerNotReadyError, match="is not here"):
        engine.bring(3, seconds=0.01)
    assert engine.handover.held == cut_of(2)


def test_what_a_closed_follower_has_dropped_is_not_installed(engine):
    found = []

    def bring():
        with pytest.raises(FollowerNotReadyError, match="is closed") as caught:
            engine.bring(2)
        found.append(caught.value)

    bringing = in_thread(bring)
    wait_until(lambda: engine.handover._wanted == name_of(2), SECONDS)
    engine.handover.stage(cut_of(2), [2])
    engine.handover.abort()
    engine.follower.is_over = True
    bringing.join(SECONDS)
    assert len(found) == 1
    assert engine.installed == [[1]]
    assert engine.handover.held == cut_of(1)
