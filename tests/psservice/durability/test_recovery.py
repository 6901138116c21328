"""A shard begun again from its data directory is the one that died: parameters, versions, identities, buffers."""

import os
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.buffers import pack
from pscore.model.layout import TensorSpec
from pscore.model.sparse_slice import SparseSlice
from pscore.wire import frames
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.durability.checkpoints import new_id
from psservice.observability.metrics import Metrics
from psservice.settings import ServerSettings
from psservice.shard import shard
from psservice.shard.buffers import exchange_buffers
from psservice.shard.join import leave
from psservice.shard.lifecycle import finish, open_shard
from psservice.shard.push import prepare_push
from psservice.state.run import RunState
from psservice.state.stream_readers import read_all, read_push
from psservice.storage.files import DISK, StorageError
from psservice.storage.journal import segment_numbers, segment_path
from psservice.storage.journal_format import DamagedError
from tests.psservice.service_makers import BF16, F16, F32, bits, layout_of, sparse_push
from tests.psservice.shard_makers import ANNA, BERT, HOUR, join, lease, present, pull, push, reason_of, theta, upload
from tests.system.tools import wait_until
from tests.tiers import examples
from verify.failpoint.copies import image

BUFFERS = (TensorSpec("mean", (3,), F32), TensorSpec("half", (2,), F16), TensorSpec("count", (), torch.int64))
LAYOUT = layout_of((60, F32), (30, BF16), (30, F16), buffers=BUFFERS)
START = [torch.zeros(3), torch.zeros(2, dtype=F16), torch.tensor(0)]


def values(seed=0):
    return torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(seed))


class Shard:
    """An engine over a directory, pushed to by whole streams, as the servicer does it."""

    def __init__(self, directory: Path, **options) -> None:
        self.said = []
        self.engine = open_shard(
            ServerSettings(lease_seconds=HOUR, data_dir=directory, **{"snapshot_seconds": HOUR, **options}),
            torch.device("cpu"),
            Metrics(),
            lambda: self.said.append(self.engine.durability.is_healthy),
        )

    def __enter__(self) -> shard.Shard:
        return self.engine

    def __exit__(self, *_) -> None:
        self.engine.close()


def begin(shard, who=ANNA):
    upload(shard, values(), who, join(shard, LAYOUT, who).generation, buffers=START)


def stream(shard, step, segment, who=ANNA, base=0, samples=1, codec=None, learning_rate=0.0, rates=(), chunk_bytes=256):
    """The messages of a push."""
    identity = pb.WorkerIdentity(run_id=shard.run.run_id, worker_id=who.worker_id, incarnation=who.incarnation)
    plan = [pb.Group(start=shard.span.start, length=shard.span.length)]
    header = pb.PushHeader(
        identity=identity,
        step=step,
        generation=present(shard),
        base_version=base,
        samples=samples,
        plan=plan,
        learning_rate=learning_rate,
        group_rates=rates,
    )
    messages, checksum = [pb.PushSparseRequest(header=header)], frames.Checksum()
    for chunk, _ in frames.encode(segment, frames.WireForm(codec), chunk_bytes=chunk_bytes) if segment else ():
        checksum.add(chunk)
        messages.append(pb.PushSparseRequest(chunks=[chunk]))
    return [*messages, pb.PushSparseRequest(commit=checksum.commit())]


def send(shard, step, segment, who=ANNA, **options):
    """Push over a stream; return the answer and whether it was a repeat."""
    messages = stream(shard, step, segment, who, **options)
    header, entries, _ = read_all(read_push(lambda opened: (shard.span, shard.value_dtype)), messages)
    answer = shard.apply_thread.run(
        prepare_push(shard, header, entries, [message.SerializeToString() for message in messages])
    )
    shard.durability.records.wait()
    return answer


def after_a_crash(directory: Path) -> Path:
    """What the disk holds at this moment, for another server to begin from."""
    copy = directory.with_name(f"{directory.name}-after")
    image(directory, copy)
    return copy


def assert_same(again: shard.Shard, engine: shard.Shard) -> None:
    assert bits(theta(again)) == bits(theta(engine))
    assert (again.model.version, again.model.generation) == (engine.model.version, engine.model.generation)
    assert (again.run.run_id, again.run.state, again.run.samples) == (
        engine.run.run_id,
        engine.run.state,
        engine.run.samples,
    )
    assert (again.run.method, again.run.method_settings) == (engine.run.method, engine.run.method_settings)
    assert [*again.state.workers] == [*engine.state.workers]
    assert again.state.datasets == engine.state.datasets
    mine, theirs = ((dict(one.state.pushes.items()), one.state.pushes.last_pushes()) for one in (again, engine))
    assert mine == theirs
    (weight, mine_buffers), (weight_there, their_buffers) = again.state.buffers.export(), engine.state.buffers.export()
    assert weight == weight_there
    assert {name: bits(value) for name, value in mine_buffers.items()} == {
        name: bits(value) for name, value in their_buffers.items()
    }


actions = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 1), st.sampled_from([0.0, 0.05, 0.5]), st.integers(0, 99)),
        st.tuples(st.just("dense"), st.integers(0, 1), st.just(0), st.integers(0, 99)),
        st.tuples(st.just("refused"), st.integers(0, 1), st.just(0), st.just(0)),
        st.tuples(st.just("repeat"), st.integers(0, 1), st.just(0), st.just(0)),
        st.tuples(st.just("buffers"), st.integers(0, 1), st.just(0), st.integers(0, 99)),
        st.tuples(st.sampled_from(["leave", "join"]), st.just(1), st.just(0), st.just(0)),
        st.tuples(st.just("snapshot"), st.just(0), st.just(0), st.just(0)),
        st.tuples(st.just("finish"), st.just(0), st.just(0), st.just(0)),
    ),
    max_size=25,
)


def perform(shard, script):
    """Do what a script says; what is refused changes nothing."""
    steps = {ANNA: 0, BERT: 0}
    last = {}
    for action, worker, density, seed in script:
        who = (ANNA, BERT)[worker]
        try:
            if action in ("push", "dense"):
                steps[who] += 1
                segment = sparse_push(shard.span, density, seed)
                if action == "dense":
                    segment = SparseSlice(shard.span, None, values(seed))
                codec = [None, pb.VALUE_CODEC_INT8, pb.VALUE_CODEC_BF16][seed % 3]
                last[who] = (steps[who], segment)
                send(shard, steps[who], segment, who, base=shard.model.version, samples=seed + 1, codec=codec)
            elif action == "refused":
                steps[who] += 1
                for _ in range(2):  # the second would leave the range of fp32
                    steps[who] += 1
                    send(shard, steps[who], SparseSlice(shard.span, torch.tensor([3]), torch.tensor([-3e38])), who)
            elif action == "repeat" and who in last:
                send(shard, *last[who], who)
            elif action == "buffers":
                data = pack([torch.randn(3), torch.randn(2).to(F16), torch.tensor(seed)])
                exchange_buffers(shard, who, present(shard), steps[who], seed + 1, data)
            elif action == "leave":
                leave(shard, who)
            elif action == "join":
                join(shard, LAYOUT, who)
            elif action == "snapshot":
                shard.durability.take()
            elif action == "finish":
                finish(shard)
        except Rejected:
            pass


@given(script=actions, keep=st.integers(1, 3))
@settings(deadline=None, max_examples=examples(60))
def test_whatever_happened_the_next_server_is_where_the_last_one_was(script, keep, tmp_path_factory):
    directory = tmp_path_factory.mktemp("data") / "live"
    with Shard(directory, keep_snapshots=keep) as shard:
        begin(shard)
        join(shard, LAYOUT, BERT)
        perform(shard, script)
        with Shard(after_a_crash(directory)) as again:
            assert_same(again, shard)
            perform(again, [("push", 0, 0.5, 3)])
            perform(shard, [("push", 0, 0.5, 3)])
            assert bits(theta(again)) == bits(theta(shard))


@pytest.mark.long
@given(script=actions, cut=st.floats(0, 1))
@settings(deadline=None, max_examples=examples(40))
def test_a_journal_cut_anywhere_gives_the_model_at_some_version_that_was(script, cut, tmp_path_factory):
    directory = tmp_path_factory.mktemp("data") / "live"
    with Shard(directory) as shard:
        begin(shard)
        seen = {0: bits(theta(shard))}
        for action in script:
            perform(shard, [action]) if action[0] not in ("push", "dense") else None
            if action[0] in ("push", "dense"):
                number = shard.model.version + 1
                segment = sparse_push(shard.span, 0.3, action[3])
                if shard.run.state is not RunState.FINISHED:
                    lease(shard)
                    perform_step(shard, number + 1000, segment)
            seen[shard.model.version] = bits(theta(shard))
        copy = after_a_crash(directory)
    newest = max((copy / "shard-0-of-1" / "journal").glob("*.journal"))
    data = newest.read_bytes()
    newest.write_bytes(data[: int(cut * len(data))])
    if newest.stat().st_size < len(data):
        with pytest.raises(DamagedError, match="acknowledged"):
            Shard(copy)
    with Shard(copy, recover="last-good") as again:
        assert seen[again.model.version] == bits(theta(again))


def perform_step(shard, step, segment):
    send(shard, step, segment, base=shard.model.version)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "live"


def test_a_repeat_after_the_restart_gets_the_first_answer_and_is_not_applied_again(directory):
    with Shard(directory) as shard:
        begin(shard)
        first, _ = send(shard, 1, sparse_push(shard.span, 0.5, 1))
        with Shard(after_a_crash(directory)) as again:
            before = bits(theta(again))
            answer, repeated = send(again, 1, sparse_push(again.span, 0.5, 1))
            assert repeated
            assert (answer.version, answer.staleness) == (first.version, first.staleness)
            assert bits(theta(again)) == before


def test_a_worker_gets_a_sparse_difference_after_the_restart_even_across_a_snapshot(directory):
    with Shard(directory, ledger_multiple=4.0) as shard:
        begin(shard)
        for step in range(1, 7):
            send(shard, step, sparse_push(shard.span, 0.05, step))
            if step == 4:
                shard.durability.take()
        with Shard(after_a_crash(directory), ledger_multiple=4.0) as again:
            for base in range(7):
                ours, theirs = pull(shard, base=base), pull(again, base=base)
                assert list(ours.messages) == list(theirs.messages)
                assert theirs.density < 0.4


def test_stopping_leaves_a_snapshot_and_the_same_history(directory):
    with Shard(directory) as shard:
        begin(shard)
        send(shard, 1, sparse_push(shard.span, 0.5, 1))
        generation, before = present(shard), bits(theta(shard))
    with Shard(directory) as again:
        assert (present(again), bits(theta(again))) == (generation, before)
        assert again.model.version == 1


@pytest.mark.parametrize("durability", ["journal", "snapshot"])
def test_a_new_history_begins_where_versions_that_workers_saw_may_be_gone(durability, directory, monkeypatch):
    with Shard(directory, durability=durability, fsync="interval") as shard:
        begin(shard)
        send(shard, 1, sparse_push(shard.span, 0.5, 1))
        copy = after_a_crash(directory)
        generation = present(shard)
    monkeypatch.setattr("psservice.storage.files.Files.boot_id", lambda _: "another")  # power was cut
    with Shard(copy, durability=durability) as again:
        assert present(again) != generation
        assert present(again) >> 32 == generation >> 32
        assert again.model.version == (1 if durability == "journal" else 0)
        send(again, 2, sparse_push(again.span, 0.5, 2))
        with Shard(after_a_crash(copy), durability=durability) as third:
            assert (present(third) == present(again)) is False or durability == "journal"


def test_with_fsync_always_a_power_cut_keeps_the_history(directory, monkeypatch):
    with Shard(directory, fsync="always") as shard:
        begin(shard)
        send(shard, 1, sparse_push(shard.span, 0.5, 1))
        copy, generation, before = after_a_crash(directory), present(shard), bits(theta(shard))
    monkeypatch.setattr("psservice.storage.files.Files.boot_id", lambda _: "another")
    with Shard(copy, fsync="always") as again:
        assert (present(again), bits(theta(again))) == (generation, before)


def test_damage_is_refused_with_file_and_offset_unless_told_to_go_back(directory, caplog):
    with Shard(directory) as shard:
        begin(shard)
        kept = {}
        for step in range(1, 6):
            send(shard, step, sparse_push(shard.span, 0.5, step))
            kept[step] = bits(theta(shard))
        copy, generation = after_a_crash(directory), present(shard)
    journal = copy / "shard-0-of-1" / "journal"
    path = segment_path(journal, segment_numbers(DISK, journal)[-1])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError, match="last-good") as raised:
        Shard(copy)
    assert raised.value.path == path
    caplog.clear()
    with Shard(copy, recover="last-good") as again:
        assert 0 < again.model.version < 5
        (told,) = [each for each in caplog.records if each.getMessage() == "went back to the last good version"]
        assert told.version == again.model.version
        # The push that is damaged is none that could be read.
        assert told.versions_dropped == f"at least {5 - again.model.version - 1}"
        assert not [each for each in caplog.records if "--recover" in str(each.__dict__)], "that was done already"
        assert bits(theta(again)) == kept[again.model.version]
        assert present(again) != generation
        version = again.model.version
    with Shard(copy) as third:
        assert third.model.version == version


def test_a_damaged_newest_snapshot_costs_nothing(directory):
    with Shard(directory) as shard:
        begin(shard)
        send(shard, 1, sparse_push(shard.span, 0.5, 1))
        newest = shard.durability.take().path
        send(shard, 2, sparse_push(shard.span, 0.5, 2))
        copy = after_a_crash(directory)
        tensors = copy / newest.relative_to(directory) / "state.safetensors"
        data = bytearray(tensors.read_bytes())
        data[-1] ^= 1
        tensors.write_bytes(data)
        with Shard(copy) as again:
            assert_same(again, shard)


def test_where_no_snapshot_is_whole_the_server_says_so(directory):
    with Shard(directory) as shard:
        begin(shard)
    for tensors in directory.glob("*/snapshots/*/state.safetensors"):
        tensors.write_bytes(b"")
    with pytest.raises(StorageError, match="no snapshot"):
        Shard(directory)


def test_a_directory_of_another_run_or_shard_is_refused(directory):
    with Shard(directory, run_id="one") as shard:
        begin(shard)
    with pytest.raises(StorageError, match="'one'"):
        Shard(directory, run_id="two")
    (directory / "shard-0-of-1").rename(directory / "shard-0-of-2")
    with pytest.raises(StorageError, match="shard 0 of 1"):
        Shard(directory, num_shards=2)


def test_a_second_server_on_the_directory_is_refused(directory):
    with Shard(directory), pytest.raises(StorageError, match="in use by another server"):
        Shard(directory)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.raises(StorageError, match="--data-dir"):
        Shard(blocked / "data")


def test_a_full_disk_refuses_pushes_until_there_is_room_and_changes_nothing(directory, monkeypatch):
    shard = Shard(directory)
    with shard as engine:
        begin(engine)
        send(engine, 1, sparse_push(engine.span, 0.5, 1))
        before, version = bits(theta(engine)), engine.model.version

        def full(descriptor, views):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "writev", full)
            assert reason_of(send, engine, 2, sparse_push(engine.span, 0.5, 2)) is ErrorCode.NOT_DURABLE
            assert shard.said == [False]
            assert (bits(theta(engine)), engine.model.version) == (before, version)
        answer, repeated = send(engine, 2, sparse_push(engine.span, 0.5, 2))
        assert (answer.version, repeated) == (2, False)
        assert shard.said == [False, True]
        with Shard(after_a_crash(directory)) as again:
            assert_same(again, engine)


def test_an_upload_that_cannot_be_kept_is_not_taken(directory, monkeypatch):
    with Shard(directory) as shard:
        generation = join(shard, LAYOUT, ANNA).generation

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("psservice.storage.tensor_file.write", full)
            assert reason_of(upload, shard, values(), ANNA, generation, buffers=START) is ErrorCode.NOT_DURABLE
        assert shard.model is None
        upload(shard, values(), ANNA, generation, buffers=START)
        assert shard.model is not None


def test_a_snapshot_that_cannot_be_written_leaves_no_copy_open(directory, monkeypatch):
    monkeypatch.setattr("psservice.model.copies._SMALL", 0)
    with Shard(directory) as shard:
        begin(shard)

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("psservice.storage.tensor_file.write", full)
            with pytest.raises(StorageError, match="No space"):
                shard.durability.take()
        for step in (1, 2):
            send(shard, step, sparse_push(shard.span, 0.5, step))
        assert shard.model.copies.nbytes == 0
        shard.durability.take()
        send(shard, 3, sparse_push(shard.span, 0.5, 3))
        assert shard.model.copies.nbytes == 0


def test_old_snapshots_go_and_the_journal_with_them(directory):
    with Shard(directory, keep_snapshots=2) as shard:
        begin(shard)
        for step in range(1, 6):
            send(shard, step, sparse_push(shard.span, 0.5, step))
            shard.durability.take()
        kept = sorted(path.name for path in (directory / "shard-0-of-1" / "snapshots").iterdir())
        assert [name.split("-v")[1] for name in kept] == ["4", "5"]
        assert segment_numbers(DISK, directory / "shard-0-of-1" / "journal")[0] == int(kept[0].split("-")[0])


@pytest.mark.long
def test_a_long_journal_is_cut_by_a_snapshot_before_its_time(directory):
    with Shard(directory, journal_bytes=1 << 20) as shard:
        begin(shard)
        first = shard.durability.last_snapshot
        everything = SparseSlice(shard.span, None, values())
        for step in range(1, 3000):
            send(shard, step, everything)
        wait_until(lambda: shard.durability.last_snapshot is not first)
        assert shard.durability.last_snapshot.manifest.version > 1000


def test_a_checkpoint_that_is_announced_while_the_model_is_replaced_comes_later(directory, caplog):
    """Operators restore several shards in two steps, and a shard waits between these for as long as the slowest."""
    with Shard(directory) as shard:
        begin(shard)
        before, announced = (new_id(shard.model.generation, number, 0) for number in (1, 2))
        shard.durability.hear_of_checkpoint(before)  # of the time before this shard's start
        prepared = shard.durability.prepare(lambda: shard.state)
        shard.durability.hear_of_checkpoint(announced)
        shard.durability.snapshot_if_due()
        shard.durability.abandon_prepared(prepared)
        wait_until(lambda: shard.durability.last_snapshot.manifest.checkpoint == announced)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


class _AfterACall:
    """A lock that is got only when a call of an operator has taken a checkpoint."""

    def __init__(self, durability, checkpoint):
        self._durability, self._checkpoint, self._lock = durability, checkpoint, durability._snapshotting

    def __enter__(self):
        with self._lock:
            checkpoint, self._checkpoint = self._checkpoint, ""
            if checkpoint:
                self.taken = self._durability._take(checkpoint)
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()


def test_a_checkpoint_that_is_announced_and_asked_for_at_once_is_taken_once(directory):
    with Shard(directory) as shard:
        begin(shard)
        durability = shard.durability
        before, announced = (new_id(shard.model.generation, number, 0) for number in (1, 2))
        durability.hear_of_checkpoint(before)  # of the time before this shard's start
        call = durability._snapshotting = _AfterACall(durability, announced)
        durability.hear_of_checkpoint(announced)
        durability.snapshot_if_due()
        wait_until(lambda: not durability.checkpoints.wanted and not durability._wake.is_set())
        with durability._snapshotting:
            assert durability.last_snapshot.path == call.taken.path


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shard = open_shard(ServerSettings(lease_seconds=HOUR), torch.device("cpu"), Metrics())
    begin(shard)
    push(shard, 1, {0: 1.0})
    shard.close()
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_is_open_is_read_to_its_end_whoever_deletes_it(tmp_path):
    with Shard(tmp_path) as one:
        begin(one)
        named = one.durability.take_asked("old")
        seal = named.manifest.tensors
        one.durability.take_asked("")
        files = one.durability.open("old")
        one.durability.delete("old")
        assert not named.path.exists()
        with pytest.raises(Rejected) as refusal:
            one.durability.open("old")
        assert refusal.value.reason is ErrorCode.NO_SUCH_CHECKPOINT
        content = {}
        for name, size, file in files:
            with file:
                content[name] = file.read()
            assert len(content[name]) == size
    assert (len(content["state.safetensors"]), zlib.crc32(content["state.safetensors"])) == (seal.bytes, seal.crc32)
    assert [*content] == ["manifest.json", "state.safetensors"]
