"""What is remembered of workers that are gone: enough for repeats, bounded, and no longer than it says."""

import pytest

from psservice.cluster.dedup import MOST_RECORDS, RECORD_SECONDS
from psservice.shard.join import leave
from psservice.types import Identity
from tests.psservice.engine_makers import ANNA, join, present, push, with_clock
from tests.psservice.recovery.test_recovery import LAYOUT, Shard, after_a_crash, begin, send
from tests.psservice.service_makers import sparse_push


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "live"


def come_and_go(engine, number):
    who = Identity(f"former{number}", "1")
    join(engine, LAYOUT, who)
    push(engine, 1, who=who, generation=present(engine))
    leave(engine, who)
    return who


def test_the_records_of_former_workers_are_bounded_in_memory_and_on_the_disk(directory):
    with Shard(directory, fsync="never") as engine:
        begin(engine)
        first = send(engine, 1, sparse_push(engine.span, 0.5, 1))
        for number in range(MOST_RECORDS + 200):
            last = come_and_go(engine, number)
        manifest = engine.durability.take_asked("").manifest
        assert len(manifest.pushes) <= MOST_RECORDS + 1
        assert len(manifest.last_pushes) <= MOST_RECORDS + 1
        assert send(engine, 1, None) == (first[0], True), "one that lives is never forgotten"
        with Shard(after_a_crash(directory)) as again:
            join(again, LAYOUT, last)
            assert push(again, 1, who=last)[1], "nor the latest of those who are gone"
            answer, repeated = send(again, 1, None)
            assert (answer.version, repeated) == (first[0].version, True)


def test_a_former_worker_is_forgotten_after_a_day(directory):
    with Shard(directory) as engine:
        begin(engine)
        clock = with_clock(engine)
        gone = come_and_go(engine, 1)
        clock.now += RECORD_SECONDS - 1
        engine.dedup.drop_old()
        assert engine.dedup.last_push(gone.worker_id) == (gone.incarnation, 1)
        clock.now += 2
        engine.dedup.drop_old()
        assert engine.dedup.last_push(gone.worker_id) is None


def test_a_worker_that_comes_back_after_its_lease_has_ended_has_its_lease_after_a_crash(directory):
    with Shard(directory) as engine:
        begin(engine)
        clock = with_clock(engine)
        clock.now += engine.settings.lease_seconds + 1
        join(engine, LAYOUT, ANNA)
        with Shard(after_a_crash(directory)) as again:
            assert again.leases.is_live(ANNA)
