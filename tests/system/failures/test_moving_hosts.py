"""Hosts that are cut off, that come back under other addresses, that change places: nothing is lost or doubled.

Servers and workers are processes on hosts of their own. One worker knows the shards by their names; the other one,
which pushes beside its computation, knows one name for all.
"""

import json
import os
import queue
import select
import signal
import subprocess
import threading

import pytest
import torch

from tests.system.namespaces import Network, why_not
from tests.system.tools import wait_until
from tests.tiers import long_but

SHARDS = 3
PORT = 50051
SERVERS = [f"psservice-{index}" for index in range(SHARDS)]
LISTED = f"psservice-{{0..{SHARDS - 1}}}.psservice:{PORT}"
DISCOVERED = f"dns:///psservice:{PORT}"
_WAIT_SECONDS = 120.0
_MOST_GROWTH = 30
"""Threads, and open files, that a worker may have more of after any number of restarts: channels of three shards."""

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("hosts")]


class Worker:
    """A steady worker on a host, and what it has said last."""

    def __init__(self, network, host, server, overlap, log):
        begin = network.inside(host, "tests.system.steady_worker")
        command = [*begin, server, host, "overlap" if overlap else "plain"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self.host, self.step, self.live = host, 0, 0
        self._answers = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def tell(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def await_answer(self):
        assert self._answers.get(timeout=_WAIT_SECONDS) == "done"

    def goes_on(self, steps=3):
        """Wait until it has made steps from now on."""
        before = self.step
        wait_until(lambda: self.step >= before + steps or self.process.poll() is not None, _WAIT_SECONDS)
        assert self.process.poll() is None

    def _read(self):
        for line in self.process.stdout:
            kind, *numbers = line.split()
            if kind == "step":
                self.step, self.live = map(int, numbers)
            else:
                self._answers.put(kind)


class World:
    """Three shards and two workers, each on a host of its own."""

    def __init__(self, network, directory):
        self.network, self._directory = network, directory
        self._log = (directory / "log").open("w")
        self._servers, self._ready = {}, {}
        self.name_all()
        for index in range(SHARDS):
            self.start(index)
        self.workers = [
            Worker(network, "worker-0", LISTED, False, self._log),
            Worker(network, "worker-1", DISCOVERED, True, self._log),
        ]
        for index in range(SHARDS):
            self.await_ready(index)
        for worker in self.workers:
            worker.goes_on()

    def name_all(self, *but):
        """Let the names say where the servers are; those that are not ready have none."""
        there = {name: [self.network.addresses[name]] for name in SERVERS if name not in but}
        names = {f"{name}.psservice": address for name, address in there.items()}
        self.network.name(names | {"psservice": [address for (address,) in reversed(there.values())]})

    def start(self, index):
        read_end, write_end = os.pipe()
        flags = {
            "listen": f"0.0.0.0:{PORT}",
            "shard-index": index,
            "num-shards": SHARDS,
            "coordinator": f"{SERVERS[0]}.psservice:{PORT}",
            "data-dir": self._directory / "data",
            "lease-seconds": 2,
            "down-mode": "exact",
            "health-listen": "",
            "metrics-listen": "",
            "log-level": "warning",
            "parent-pid": os.getpid(),
            "ready-fd": write_end,
        }
        command = [*self.network.inside(SERVERS[index], "psservice"), "serve", "--insecure"]
        command += [f"--{name}={value}" for name, value in flags.items()]
        self._servers[index] = subprocess.Popen(command, pass_fds=(write_end,), stderr=self._log)
        os.close(write_end)
        self._ready[index] = read_end

    def await_ready(self, index):
        with os.fdopen(self._ready.pop(index)) as stream:
            readable, _, _ = select.select([stream], [], [], _WAIT_SECONDS)
            assert readable
            assert json.loads(stream.readline())["address"].endswith(str(PORT))

    def end(self, index, number):
        self._servers[index].send_signal(number)
        return self._servers[index].wait(_WAIT_SECONDS)

    def account(self):
        """Let all workers rest, and compare what they have pushed with what the servers and they themselves have."""
        reports = []
        for worker in self.workers:
            worker.tell("rest")
        for worker in self.workers:
            worker.await_answer()
        for worker in self.workers:
            path = self._directory / worker.host
            worker.tell("report", path)
            worker.await_answer()
            reports.append(torch.load(path))
        pushed = sum(report["total"] for report in reports)
        for report in reports:
            assert torch.equal(report["server"], -pushed)
            assert torch.equal(report["replica"], report["server"])
        for worker in self.workers:
            worker.tell("go")
            worker.await_answer()
        return reports

    def close(self):
        for worker in self.workers:
            worker.tell("end")
        for worker in self.workers:
            worker.await_answer()
            assert worker.process.wait(_WAIT_SECONDS) == 0
        self._log.close()

    @property
    def log(self):
        return (self._directory / "log").read_text()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    reason = why_not()
    if reason:
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("world")
    with Network([*SERVERS, "worker-0", "worker-1"]) as network:
        world = World(network, directory)
        yield world
        world.close()
    assert "Traceback" not in world.log


@pytest.mark.parametrize(("host", "how"), long_but([(0, "unplugged")], [(0, "unplugged"), (1, "blocked")]))
def test_a_worker_host_is_cut_off_for_longer_than_its_lease(world, host, how):
    cut, other = world.workers[host], world.workers[1 - host]
    cut_off, heal = {
        "unplugged": (world.network.unplug, world.network.plug),
        "blocked": (world.network.block, world.network.unblock),
    }[how]
    cut_off(cut.host)
    wait_until(lambda: other.live == 1, _WAIT_SECONDS)
    other.goes_on()
    heal(cut.host)
    cut.goes_on()
    world.account()


def test_a_server_host_vanishes_and_comes_back_under_another_address(world):
    name = SERVERS[1]
    world.network.take_address(name)  # no connection is closed: nobody is told
    world.end(1, signal.SIGKILL)
    world.name_all(name)
    world.network.give_address(name, world.network.new_address())
    world.start(1)
    world.await_ready(1)
    world.name_all()
    for worker in world.workers:
        worker.goes_on()
    world.account()


@pytest.mark.long
def test_two_shards_change_places_and_the_names_say_so_late(world):
    first, second = SERVERS[1:]
    for index in (1, 2):
        world.end(index, signal.SIGKILL)
    one, other = world.network.addresses[first], world.network.addresses[second]
    world.network.take_address(second)
    world.network.give_address(first, other)
    world.network.give_address(second, one)
    for index in (1, 2):
        world.start(index)
    for index in (1, 2):
        world.await_ready(index)
    world.workers[1].goes_on()  # it asks each address which shard it is
    wait_until(lambda: "takes this server for shard" in world.log, _WAIT_SECONDS)  # the other one was refused
    world.name_all()
    world.workers[0].goes_on()
    world.account()


@pytest.mark.long
def test_a_rolling_update_as_a_stateful_set_does_it(world):
    before = world.account()
    for index in reversed(range(SHARDS)):
        name = SERVERS[index]
        assert world.end(index, signal.SIGTERM) == 0
        world.network.give_address(name, world.network.new_address())
        world.name_all(name)
        world.start(index)
        world.await_ready(index)
        world.name_all()
    for worker in world.workers:
        worker.goes_on()
    for earlier, later in zip(before, world.account(), strict=True):
        for what in ("threads", "files"):
            assert later[what] <= earlier[what] + _MOST_GROWTH
