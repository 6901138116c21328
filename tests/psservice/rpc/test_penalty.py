"""Callers who are refused by their own fault wait, once they are many; nobody else does."""

import pytest

from pscore.wire.errors import ErrorCode, Rejected
from psservice.rpc.penalty import Penalty, is_fault


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_the_first_hundred_of_a_host_are_answered_at_once_and_then_fifty_a_second(clock):
    penalty = Penalty(clock)
    waits = [penalty.seconds(f"ipv4:10.0.0.1:{port}") for port in range(150)]
    assert waits[:100] == [0.0] * 100
    assert waits[149] == pytest.approx(1.0)
    assert penalty.seconds("ipv4:10.0.0.2:1") == 0.0, "another host"
    clock.now += 10.0
    assert penalty.seconds("ipv4:10.0.0.1:1") == 0.0, "it has stopped for a while"


def test_no_answer_waits_for_long(clock):
    penalty = Penalty(clock)
    assert max(penalty.seconds("ipv6:%5B::1%5D:1") for _ in range(10_000)) == pytest.approx(5.0)


def test_a_large_call_counts_as_many(clock):
    penalty = Penalty(clock)
    waits = [penalty.seconds("ipv4:10.0.0.1:1", 4 << 20) for _ in range(3)]
    assert waits[0] > 1.0
    assert waits[2] == pytest.approx(5.0)


@pytest.mark.parametrize(
    "reason", [ErrorCode.STALE_GENERATION, ErrorCode.BUSY, ErrorCode.ROUND_OPEN, ErrorCode.LEASE_EXPIRED]
)
def test_what_training_meets_is_no_fault(reason):
    assert not is_fault(Rejected(reason, "why"))


@pytest.mark.parametrize("reason", [ErrorCode.UNAUTHENTICATED, ErrorCode.BAD_REQUEST, ErrorCode.FINGERPRINT_MISMATCH])
def test_what_a_caller_has_to_mend_is_one_unless_it_ends_by_itself(reason):
    assert is_fault(Rejected(reason, "why"))
    assert not is_fault(Rejected(reason, "why", retry_seconds=1.0))


def test_hosts_are_forgotten_beyond_a_number(clock):
    penalty = Penalty(clock)
    for number in range(10_000):
        penalty.seconds(f"ipv4:10.{number // 256}.{number % 256}.1:1")
    assert len(penalty._paid_until) <= 4096
