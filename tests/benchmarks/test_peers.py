"""A peer that fails is a row of the table, and the others go on."""

from contextlib import contextmanager

from benchmarks.harness.children import ChildFailedError
from benchmarks.harness.section import Plan
from benchmarks.peers import peers
from benchmarks.peers.peers import Parties, Result
from benchmarks.workload.layouts import one_tensor
from benchmarks.workload.socket_bytes import Traffic

PLAN = Plan(True, one_tensor(10), "", 0.01, 3, 3, 0, lambda what: None)


@contextmanager
def broken():
    raise ChildFailedError("server: RuntimeError: address in use")
    yield


@contextmanager
def fine():
    yield Parties(0, [])


def test_a_failure_does_not_stop_the_rest(monkeypatch):
    monkeypatch.setattr(peers, "_peers", lambda job, density: {peers._GLOO: broken, "ours": fine})
    monkeypatch.setattr(peers, "measure", lambda job, parties: Result(10.0, 1e6, 2e6, 0.01, 0.5, 0.9))
    section = peers.run(PLAN)
    first = {row[0]: row[1:] for row in section.tables[0].rows}
    assert first["ours"][0] == "10"
    assert f"{peers._GLOO}: failed" in first
    assert section.figures[peers._GLOO] == {"failed": "server: RuntimeError: address in use"}
    assert any("address in use" in note for note in section.notes)


def test_traffic_is_what_came_since():
    assert Traffic(10, 20).since(Traffic(4, 5)) == Traffic(6, 15)
