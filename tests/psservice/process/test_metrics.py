"""What a shard counts and tells of itself, where it happens."""

import os
from types import SimpleNamespace

import pytest
import torch

from pscore.model.layout import Span
from pscore.wire.errors import ErrorCode
from psservice.durability.durability import Durability
from psservice.observability.metrics import Metrics
from psservice.rpc.status import bind_metrics
from psservice.rpc.workers import WorkerCalls, dense_bytes
from psservice.settings import ServerSettings
from psservice.shard.join import leave
from psservice.shard.lifecycle import open_shard
from psservice.storage import snapshots
from psservice.storage.environment import MACHINE
from tests.psservice.service_makers import BF16, F32, layout_of
from tests.psservice.shard_makers import ANNA, BERT, HOUR, join, open_shards, push, reason_of, upload

LAYOUT = layout_of((6, F32), (4, BF16))


@pytest.fixture
def running(tmp_path):
    """One engine with a data directory, whose metrics are followed, and Anna's model in it."""
    settings = ServerSettings(lease_seconds=HOUR, data_dir=tmp_path, fsync="never", snapshot_seconds=HOUR, run_id="r")
    shard = open_shard(settings, torch.device("cpu"), Metrics())
    try:
        bind_metrics(shard)
        upload(shard, torch.zeros(10), ANNA, join(shard, LAYOUT, ANNA).generation)
        yield shard
    finally:
        shard.close()


def value(shard, name, **labels):
    return shard.metrics.registry.get_sample_value(name, labels)


def test_bounds_and_size_are_told(running):
    settings = running.settings
    assert value(running, "psservice_queue_limit") == settings.apply_queue_limit
    assert value(running, "psservice_call_limit") == settings.rpc_threads
    assert value(running, "psservice_snapshot_interval_seconds") == HOUR
    assert value(running, "psservice_elements") == 10
    assert value(running, "psservice_training") == 1
    (info,) = running.metrics.shard_info.collect()
    labels = info.samples[0].labels
    assert (labels["run"], labels["shard"], labels["shards"], labels["method"]) == ("r", "0", "1", "dgs")
    assert labels["durability"] == "journal"


@pytest.mark.parametrize(
    ("elements", "given", "most"), [(10, 0, 7 << 30), (100_000_000, 0, 14_400_000_000), (10, 7, 7)]
)
def test_calls_may_occupy_a_multiple_of_the_shard(elements, given, most):
    with open_shards(memory_bytes=given) as (shard,):
        WorkerCalls(shard)
        join(shard, layout_of((elements, F32)), ANNA)
        assert value(shard, "psservice_memory_bytes_limit") == most
        assert value(shard, "psservice_bytes_in_flight_limit") == most, "there are no images yet"


def test_a_shard_that_follows_waits_longer_for_its_own_snapshot(tmp_path):
    settings = {"num_shards": 2, "shard_index": 1, "snapshot_seconds": 10}
    nothing_kept = SimpleNamespace(settings=ServerSettings(**settings), environment=MACHINE)
    assert Durability(nothing_kept, print).snapshot_interval_seconds == 0
    shard = SimpleNamespace(settings=ServerSettings(**settings, data_dir=tmp_path), environment=MACHINE)
    kept = Durability(shard, print)
    assert kept.snapshot_interval_seconds == 30
    kept.abandon()


def test_what_a_dense_push_would_weigh_is_counted_in_the_parameters_own_types():
    assert dense_bytes(LAYOUT, Span(0, 10)) == 6 * 4 + 4 * 2
    assert dense_bytes(LAYOUT, Span(5, 7)) == 4 + 2


def test_coming_and_going_is_counted_once(running):
    join(running, LAYOUT, BERT)
    join(running, LAYOUT, BERT)
    assert value(running, "psservice_joins_total") == 2
    leave(running, BERT)
    leave(running, BERT)
    assert value(running, "psservice_leaves_total") == 1


def test_pushes_are_unsaved_from_the_first_on_until_a_snapshot_holds_them(running):
    assert value(running, "psservice_unsaved_since_unix_seconds") == 0
    push(running, 1, {2: 1.0})
    since = value(running, "psservice_unsaved_since_unix_seconds")
    assert since == pytest.approx(value(running, "psservice_last_push_unix_seconds"), abs=60)
    push(running, 2, {2: 1.0}, base=1)
    assert value(running, "psservice_unsaved_since_unix_seconds") == since
    running.durability.take()
    assert value(running, "psservice_unsaved_since_unix_seconds") == 0
    push(running, 3, {2: 1.0}, base=2)
    assert value(running, "psservice_unsaved_since_unix_seconds") >= since


def test_failed_writes_are_counted(running, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "writev", full)
        assert reason_of(join, running, LAYOUT, BERT) is ErrorCode.NOT_DURABLE
    assert value(running, "psservice_journal_errors_total") == 1
    before = value(running, "psservice_journal_bytes_total")
    push(running, 1, {2: 1.0})
    assert value(running, "psservice_journal_bytes_total") > before
    with monkeypatch.context() as patched:
        patched.setattr(snapshots, "prepare", full)
        assert reason_of(running.durability.take_asked, "") is ErrorCode.NOT_DURABLE
    assert value(running, "psservice_snapshot_errors_total") == 1


def test_waiting_and_calls_are_timed(running):
    before = value(running, "psservice_queue_seconds_count")
    push(running, 1, {2: 1.0})
    assert value(running, "psservice_queue_seconds_count") == before + 1
    assert value(running, "process_resident_memory_bytes") > 0
    assert value(running, "process_start_time_seconds") < os.stat(running.settings.data_dir).st_mtime + 60
