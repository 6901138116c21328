"""A network of known rate that leaves nothing behind. Needs root and iproute2."""

import subprocess

import pytest

from benchmarks.network import lab
from benchmarks.network.lab import Lab, inside, unavailable


def _usable():
    if unavailable():
        return False
    try:
        with Lab(1, 1e8):
            return True
    except lab.LabError:
        return False


pytestmark = pytest.mark.skipif(not _usable(), reason="needs root, iproute2 and network namespaces")


def _namespaces():
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_hosts_reach_one_another_no_faster_than_the_rate():
    with Lab(2, 50e6) as network:
        assert 0 < network.calibrate(0, 1, 0.5) < 1.15 * 50e6


def test_nothing_is_left_after_a_failure():
    before = _namespaces()
    network = Lab(2, 50e6)
    assert network.space(1) in _namespaces()
    with pytest.raises(RuntimeError, match="as planned"), network:
        raise RuntimeError("as planned")
    assert _namespaces() == before


def test_the_caller_stays_where_it_is():
    def interfaces():
        return subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout

    before = interfaces()
    with Lab(1, 50e6) as network:
        assert "card" in inside(network.space(0), interfaces)
        assert interfaces() == before


def test_what_a_killed_run_left_is_removed(monkeypatch):
    gone = 4_000_000  # above the kernel's largest process id
    subprocess.run(["ip", "netns", "add", f"{lab._PREFIX}{gone}-switch"], check=True)
    with Lab(1, 50e6):
        pass
    assert str(gone) not in _namespaces()
