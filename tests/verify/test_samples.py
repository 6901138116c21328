import os
import time

import pytest

from psservice.membership.leases import Leases
from psservice.replies.reply_mode import ReplyRule
from psservice.state.workers import Worker
from psservice.values import Identity
from verify.failpoint import skewed_clock
from verify.validate.process_samples import look, trend


def judged(values, **options):
    options = {"share": 0.05, "least": 1.0, "warm_up": 10.0} | options
    return trend("memory", "MiB", [(float(second), float(value)) for second, value in enumerate(values)], **options)


def test_a_level_with_noise_is_flat_and_the_warm_up_does_not_count():
    found = judged([*range(10), *(100 + second % 3 for second in range(60))])
    assert found.flat
    assert found.level == 101


def test_a_leak_is_found():
    found = judged([100 + 0.2 * second for second in range(100)])
    assert not found.flat
    assert found.slope == pytest.approx(12.0)


def test_falling_is_no_fault_and_too_little_is_an_error():
    assert judged([100 - second for second in range(50)]).flat
    with pytest.raises(ValueError, match="too few"):
        judged(range(12))


def test_a_process_is_sampled(tmp_path):
    (tmp_path / "file").write_bytes(bytes(1000))
    found = look(os.getpid(), tmp_path, 3.0)
    assert found.disk_bytes == 1000
    assert found.memory_bytes > 1 << 20
    assert min(found.threads, found.descriptors) >= 1


def test_the_servers_own_modules_read_the_skewed_clock_and_leases_do_not_mind(tmp_path, monkeypatch):
    path = tmp_path / "clock"
    skewed_clock.set_error(path, 0.0)
    clock = skewed_clock.SkewedClock(path)
    assert clock() == pytest.approx(time.time(), abs=5)
    changed = skewed_clock.modules_with_a_clock()
    assert {"psservice.storage.environment", "psservice.rpc.status", "psservice.membership.leases"} <= {*changed}
    shifted = skewed_clock.shifted_time(clock)
    monkeypatch.setattr("psservice.membership.leases.time", shifted)
    members = Leases(60.0, lambda: ReplyRule("exact"))
    members.grant(Worker(Identity("w", "1")))
    for error in (-3e8, 3e8):
        skewed_clock.set_error(path, error)
        assert clock() == pytest.approx(time.time() + error, abs=5)
        assert members.is_live(Identity("w", "1"))
