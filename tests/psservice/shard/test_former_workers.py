"""What is remembered of workers that are gone: enough for repeats, bounded, and no longer than it says."""

import pytest

from psservice.shard.join import leave
from psservice.shard.lifecycle import forget_old_pushes
from psservice.state.pushes import MOST_RECORDS, RECORD_SECONDS
from psservice.values import Identity
from tests.psservice.durability.test_recovery import LAYOUT, Shard, after_a_crash, begin, send
from tests.psservice.service_makers import sparse_push
from tests.psservice.shard_makers import ANNA, join, present, push, with_clock


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "live"


def come_and_go(shard, number):
    who = Identity(f"former{number}", "1")
    join(shard, LAYOUT, who)
    push(shard, 1, who=who, generation=present(shard))
    leave(shard, who)
    return who


@pytest.mark.long
def test_the_records_of_former_workers_are_bounded_in_memory_and_on_the_disk(directory):
    with Shard(directory, fsync="never") as shard:
        begin(shard)
        first = send(shard, 1, sparse_push(shard.span, 0.5, 1))
        for number in range(MOST_RECORDS + 200):
            last = come_and_go(shard, number)
        forget_old_pushes(shard)
        manifest = shard.durability.take_asked("").manifest
        assert len(manifest.pushes) <= MOST_RECORDS + 1
        assert len(manifest.last_pushes) <= MOST_RECORDS + 1
        assert send(shard, 1, None) == (first[0], True), "one that lives is never forgotten"
        with Shard(after_a_crash(directory)) as again:
            join(again, LAYOUT, last)
            assert push(again, 1, who=last)[1], "nor the latest of those who are gone"
            answer, repeated = send(again, 1, None)
            assert (answer.version, repeated) == (first[0].version, True)


def test_a_former_worker_is_forgotten_after_a_day(directory):
    with Shard(directory) as shard:
        begin(shard)
        clock = with_clock(shard)
        gone = come_and_go(shard, 1)
        clock.now += RECORD_SECONDS - 1
        forget_old_pushes(shard)
        assert shard.state.pushes.last(gone.worker_id) == (gone.incarnation, 1)
        clock.now += 2
        forget_old_pushes(shard)
        assert shard.state.pushes.last(gone.worker_id) is None


def test_a_worker_that_comes_back_after_its_lease_has_ended_has_its_lease_after_a_crash(directory):
    with Shard(directory) as shard:
        begin(shard)
        clock = with_clock(shard)
        clock.now += shard.settings.lease_seconds + 1
        join(shard, LAYOUT, ANNA)
        with Shard(after_a_crash(directory)) as again:
            assert again.leases.is_live(ANNA)
