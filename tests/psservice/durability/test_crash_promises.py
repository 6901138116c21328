"""What an engine had promised where it died at an unlucky moment, and what the next one keeps of it."""

import os

import pytest
import torch

from pscore.model import modelfile
from pscore.model.buffers import pack
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import ErrorCode
from psservice.shard import lifecycle
from psservice.shard.buffers import exchange_buffers
from psservice.shard.lifecycle import finish
from psservice.shard.rollback import roll_back
from psservice.state.run import RunState
from psservice.storage.files import Files
from tests.psservice.durability.test_recovery import LAYOUT, Shard, after_a_crash, assert_same, begin, send
from tests.psservice.service_makers import sparse_push
from tests.psservice.shard_makers import ANNA, BERT, join, present, reason_of
from tests.system.tools import wait_until
from verify.failpoint.copies import image


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "live"


def test_a_lease_that_could_not_be_written_down_is_not_granted(directory, monkeypatch):
    with Shard(directory) as shard:
        begin(shard)

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "writev", full)
            assert reason_of(join, shard, LAYOUT, BERT) is ErrorCode.NOT_DURABLE
        join(shard, LAYOUT, BERT)
        with Shard(after_a_crash(directory)) as again:
            assert_same(again, shard)


def test_nothing_is_acknowledged_behind_a_snapshot_of_another_model_that_cannot_be_removed(directory, monkeypatch):
    """A restart would begin with that snapshot, and could not apply what was pushed to the model before it."""
    with Shard(directory) as shard:
        begin(shard)
        send(shard, 1, sparse_push(shard.span, 0.5, 1))
        real = Files.rename

        def sync(self, path):
            if path.name == "snapshots":
                raise OSError(5, "Input/output error")

        def rename(self, path, to):
            if to.name.startswith("."):
                raise OSError(5, "Input/output error")
            real(self, path, to)

        with monkeypatch.context() as patched:
            patched.setattr(Files, "sync", sync)
            patched.setattr(Files, "rename", rename)
            assert reason_of(roll_back, shard, 0, "") is ErrorCode.NOT_DURABLE
        assert shard.model.version == 1
        assert reason_of(send, shard, 2, sparse_push(shard.span, 0.5, 2)) is ErrorCode.NOT_DURABLE
        assert shard.durability.is_broken
        with Shard(after_a_crash(directory)) as again:
            assert again.model.version == 0  # the model of the snapshot that stayed


def test_buffers_that_meet_a_rollback_go_nowhere(directory):
    with Shard(directory) as shard:
        begin(shard)
        generation = present(shard)
        roll_back(shard, 0, "")
        data = pack([torch.ones(3), torch.ones(2, dtype=torch.float16), torch.tensor(1)])
        assert reason_of(exchange_buffers, shard, ANNA, generation, 1, 5, data) is ErrorCode.STALE_GENERATION
        with Shard(after_a_crash(directory)) as again:
            assert_same(again, shard)


def test_a_run_that_ended_as_the_server_died_is_ended_by_the_next(directory, monkeypatch, tmp_path):
    options = {"end_versions": 2, "final_model": tmp_path / "final.safetensors"}
    with Shard(directory, **options) as engine:
        begin(engine)
        send(engine, 1, sparse_push(engine.span, 0.5, 1))
        before = directory.with_name("before")
        with monkeypatch.context() as dying:
            dying.setattr(lifecycle, "_end", lambda *_: image(directory, before))
            send(engine, 2, sparse_push(engine.span, 0.5, 2))
    with Shard(before, **options) as again:
        assert (again.run.state, again.model.version) == (RunState.FINISHED, 2)
        assert finish(again) == str(options["final_model"])
        options["final_model"].write_bytes(b"of another run")  # as if it had died before that was written
        behind = directory.with_name("behind")
        image(before, behind)
    with Shard(behind, **options) as third:
        assert finish(third) == str(options["final_model"])
        assert modelfile.read_metadata(options["final_model"])["version"] == "2"


def test_a_final_model_whose_values_a_power_cut_took_is_written_again(directory, tmp_path):
    path = tmp_path / "final.safetensors"
    options = {"end_versions": 1, "final_model": path}
    with Shard(directory, **options) as engine:
        begin(engine)
        send(engine, 1, sparse_push(engine.span, 0.5, 1))
        assert finish(engine) == str(path)
    whole = path.read_bytes()
    head = 8 + int.from_bytes(whole[:8], "little")
    path.write_bytes(whole[:head] + bytes(len(whole) - head))
    with Shard(directory, **options) as again:
        assert finish(again) == str(path)
    assert path.read_bytes()[-len(whole) + head :] == whole[head:]


def test_a_download_waits_for_the_disk_as_a_pull_does(directory, monkeypatch):
    with Shard(directory, fsync="always") as shard:
        begin(shard)
        waited = []
        monkeypatch.setattr(shard.durability.records, "wait", lambda: waited.append(True))
        shard.copy_model()
        assert waited


def test_a_push_that_is_refused_beside_another_record_takes_none_away(directory, monkeypatch):
    with Shard(directory) as shard:
        begin(shard)
        send(shard, 1, large(shard))
        real = shard.model.take

        def beside(*arguments):  # a worker joins while the push is being applied
            join(shard, LAYOUT, BERT)
            return real(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(shard.model, "take", beside)
            assert reason_of(send, shard, 2, large(shard)) is ErrorCode.NON_FINITE
        send(shard, 2, sparse_push(shard.span, 0.5, 2))
        with Shard(after_a_crash(directory)) as again:
            assert_same(again, shard)
            assert again.leases.is_live(BERT)


@pytest.mark.long
def test_a_journal_of_refused_pushes_and_joins_is_cut_by_a_snapshot_too(directory):
    with Shard(directory, journal_bytes=1 << 20) as shard:
        begin(shard)
        send(shard, 1, large(shard))
        first = shard.durability.take()
        for _ in range(12_000):
            assert reason_of(send, shard, 2, large(shard)) is ErrorCode.NON_FINITE
        wait_until(lambda: shard.durability.last_snapshot is not first)
        assert shard.model.version == first.manifest.version
        assert shard.durability.last_snapshot.manifest.segment > first.manifest.segment


def large(shard):
    """A push of which the second would leave the range of fp32."""
    return SparseSlice(shard.span, torch.tensor([3]), torch.tensor([-3e38]))
