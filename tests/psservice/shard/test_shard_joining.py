"""Joining and uploading: one model, one uploader at a time, and no slow one overwrites the next."""

import threading

import pytest
import torch

from pscore.model import modelfile
from pscore.model.layout import TensorSpec
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.generation import epoch
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.replies.reply_session import ReplyMode
from psservice.shard.join import evict, leave
from psservice.shard.model_install import upload_progress
from psservice.values import Identity
from tests.psservice.service_makers import BF16, F32, layout_of
from tests.psservice.shard_makers import (
    ANNA,
    BERT,
    HOUR,
    READY,
    UPLOAD,
    WAIT,
    full,
    join,
    open_shards,
    pull,
    push,
    reason_of,
    serving,
    theta,
    upload,
    with_clock,
)

LAYOUT = layout_of((6, F32), (4, BF16))
OTHER = layout_of((6, F32), (5, BF16))
ONES, TWOS = torch.ones(10), torch.full((10,), 2.0)


def test_the_first_uploads_and_the_others_wait_until_it_is_there():
    with open_shards() as (shard,):
        first, second = join(shard, LAYOUT, ANNA), join(shard, LAYOUT, BERT)
        assert (first.state, epoch(first.generation)) == (UPLOAD, 1)
        assert second.state == WAIT
        assert reason_of(upload, shard, TWOS, BERT, first.generation) is ErrorCode.STALE_GENERATION
        upload(shard, ONES, ANNA, first.generation)
        assert (join(shard, LAYOUT, BERT).state, join(shard, LAYOUT, ANNA).state) == (READY, READY)
        assert join(shard, LAYOUT, BERT).generation == first.generation
        assert torch.equal(theta(shard), ONES)


@pytest.mark.parametrize("how", ["leaves", "expires"])
def test_the_next_to_poll_uploads_when_the_holder(how):
    with open_shards() as (shard,):
        clock = with_clock(shard)
        first = join(shard, LAYOUT, ANNA)
        if how == "leaves":
            leave(shard, ANNA)
        else:
            clock.now += HOUR
        second = join(shard, LAYOUT, BERT)
        assert (second.state, epoch(second.generation)) == (UPLOAD, 2)
        join(shard, LAYOUT, ANNA)
        assert reason_of(upload, shard, ONES, ANNA, first.generation) is ErrorCode.STALE_GENERATION
        upload(shard, TWOS, BERT, second.generation)
        assert reason_of(upload, shard, ONES, ANNA, first.generation) is ErrorCode.STALE_GENERATION
        assert torch.equal(theta(shard), TWOS)


def half_sent(shard, clock):
    """Anna has half of the model sent within an hour and a half; her lease ends an hour later."""
    generation = join(shard, LAYOUT, ANNA).generation
    for share in (0.2, 0.4, 0.5):
        clock.now += HOUR / 2
        shard.leases.require(ANNA)
        shard.uploads.note_progress(ANNA, share)
    return generation


def test_who_has_sent_much_may_be_back_for_the_rest_as_long_as_sending_it_took():
    with open_shards(stream_idle_seconds=10 * HOUR) as (shard,):
        clock = with_clock(shard)
        generation = half_sent(shard, clock)
        clock.now += 2 * HOUR
        assert not shard.leases.is_live(ANNA)
        assert join(shard, LAYOUT, BERT).state == WAIT
        assert upload_progress(shard).share == 0.5
        assert join(shard, LAYOUT, ANNA).generation == generation
        shard.uploads.note_progress(ANNA, 0.6)
        clock.now += 5 * HOUR
        assert upload_progress(shard) is None
        assert join(shard, LAYOUT, BERT).state == UPLOAD


def test_another_worker_uploads_at_once_where_the_uploader_is_evicted():
    with open_shards(stream_idle_seconds=10 * HOUR) as (shard,):
        half_sent(shard, with_clock(shard))
        assert join(shard, LAYOUT, BERT).state == WAIT
        evict(shard, ANNA.worker_id, HOUR)
        assert upload_progress(shard) is None
        assert join(shard, LAYOUT, BERT).state == UPLOAD


def test_who_lives_and_sends_nothing_has_its_turn_no_longer():
    with open_shards(stream_idle_seconds=HOUR / 2) as (shard,):
        clock = with_clock(shard)
        half_sent(shard, clock)
        assert join(shard, LAYOUT, BERT).state == WAIT
        clock.now += 0.6 * HOUR
        assert shard.leases.is_live(ANNA)
        assert join(shard, LAYOUT, BERT).state == UPLOAD


@pytest.mark.parametrize("shares", [(), (0.0, 0.5), (0.3, 0.5 + 1e-9)], ids=["asks", "falls and rises", "hardly rises"])
def test_who_does_not_get_on_has_its_turn_no_longer_whatever_it_says(shares):
    with open_shards(stream_idle_seconds=HOUR / 2) as (shard,):
        clock = with_clock(shard)
        generation = half_sent(shard, clock)
        for _ in range(4):
            clock.now += 0.15 * HOUR
            shard.leases.require(ANNA)
            if not shares:
                assert join(shard, LAYOUT, ANNA).generation == generation
            for share in shares:
                shard.uploads.note_progress(ANNA, share)
        assert join(shard, LAYOUT, BERT).state == UPLOAD


def test_a_slow_first_uploader_cannot_overwrite_the_second_at_any_shard():
    with open_shards(2) as (_, shard):
        for who in (ANNA, BERT):
            assert join(shard, LAYOUT, who).state == WAIT
        assert reason_of(upload, shard, ONES, ANNA, 0) is ErrorCode.STALE_GENERATION
        upload(shard, TWOS, BERT, full(2))
        assert reason_of(upload, shard, ONES, ANNA, full(1, nonce=9)) is ErrorCode.STALE_GENERATION
        assert reason_of(upload, shard, ONES, ANNA, full(2, nonce=9)) is ErrorCode.ALREADY_UPLOADED
        assert torch.equal(theta(shard), TWOS[5:])
        upload(shard, ONES, ANNA, full(3))
        assert shard.model.generation == full(3)


def test_the_upload_counts_above_every_epoch_that_was_seen():
    with open_shards() as (shard,):
        first = join(shard, LAYOUT, ANNA, seen=full(41))
        assert epoch(first.generation) == 42
        assert join(shard, LAYOUT, ANNA, seen=full(7)).generation == first.generation
        assert epoch(join(shard, LAYOUT, ANNA, seen=full(42)).generation) == 43


def test_who_has_filled_another_shard_goes_on_with_the_same_upload():
    with open_shards() as (shard,):
        generation = join(shard, LAYOUT, ANNA).generation
        assert join(shard, LAYOUT, ANNA, seen=generation).generation == generation
        assert epoch(join(shard, LAYOUT, ANNA, seen=generation ^ 1).generation) == 2, "another one's of this epoch"


def test_two_histories_never_have_the_same_generation():
    def first_of_a_server():
        with open_shards() as (shard,):
            return join(shard, LAYOUT, ANNA).generation

    one, other = first_of_a_server(), first_of_a_server()
    assert epoch(one) == epoch(other) == 1
    assert one != other


def test_a_worker_with_a_replica_goes_before_one_with_fresh_weights():
    with open_shards() as (shard,):
        fresh = join(shard, LAYOUT, ANNA)
        replica = join(shard, LAYOUT, BERT, has_replica=True)
        assert replica.state == UPLOAD
        assert join(shard, LAYOUT, ANNA).state == WAIT
        assert join(shard, LAYOUT, ANNA, has_replica=True).state == WAIT, "one replica is as good as another"
        assert reason_of(upload, shard, ONES, ANNA, fresh.generation) is ErrorCode.STALE_GENERATION
        upload(shard, TWOS, BERT, replica.generation, version=17)
        assert shard.model.version == 17


def test_without_a_lease_nothing_is_uploaded():
    with open_shards() as (shard,):
        generation = join(shard, LAYOUT, ANNA).generation
        leave(shard, ANNA)
        assert reason_of(upload, shard, ONES, ANNA, generation) is ErrorCode.LEASE_EXPIRED


def test_a_new_upload_begins_another_history():
    with open_shards(2) as (_, shard):
        join(shard, LAYOUT)
        upload(shard, ONES, ANNA, full(1))
        push(shard, 1)
        upload(shard, TWOS, ANNA, full(2))
        assert reason_of(push, shard, 2, generation=full(1)) is ErrorCode.STALE_GENERATION
        assert reason_of(pull, shard, base=1, generation=full(1)) is ErrorCode.STALE_GENERATION
        assert pull(shard).version == 0


def test_a_new_upload_frees_every_image():
    with open_shards(2, down_mode="topk") as (_, shard):
        join(shard, LAYOUT)
        upload(shard, ONES, ANNA, full(1))
        first = pull(shard)
        pull(shard, base=0, acknowledged=first.number, image=True)
        member = shard.leases.require(ANNA)
        assert member.downlink.image is not None
        upload(shard, TWOS, ANNA, full(2))
        assert member.downlink.image is None
        everything = pull(shard, base=0, acknowledged=first.number, image=True)
        assert (everything.mode, everything.density) == (ReplyMode.EXACT, 1.0)


def test_a_model_smaller_than_the_number_of_shards_is_refused():
    with open_shards(2) as shards:
        for shard in shards:
            assert reason_of(join, shard, layout_of((1, F32))) is ErrorCode.BAD_REQUEST
            join(shard, layout_of((2, F32)))


def test_another_model_is_refused_by_tensor():
    with serving(LAYOUT, ONES) as shard:
        with pytest.raises(Rejected, match="t1") as refused:
            join(shard, OTHER, BERT)
        assert refused.value.reason is ErrorCode.FINGERPRINT_MISMATCH
        assert refused.value.metadata == {"tensor": "t1"}
        assert len(shard.leases) == 1


def test_one_who_is_alone_before_any_upload_may_change_the_model():
    with open_shards() as (shard,):
        join(shard, OTHER, ANNA)
        leave(shard, ANNA)
        upload(shard, ONES, BERT, join(shard, LAYOUT, BERT, method="asgd").generation)
        assert shard.state.layout == LAYOUT
        assert reason_of(join, shard, LAYOUT, ANNA, method="dgs") is ErrorCode.SETTINGS_MISMATCH


def test_other_settings_are_refused_and_give_no_lease():
    with serving(LAYOUT, ONES) as shard:
        assert reason_of(join, shard, LAYOUT, BERT, method="asgd") is ErrorCode.SETTINGS_MISMATCH
        assert reason_of(join, shard, LAYOUT, BERT, method_settings={"m": "1"}) is ErrorCode.SETTINGS_MISMATCH
        assert len(shard.leases) == 1


def test_a_living_name_is_taken():
    with serving(LAYOUT, ONES) as shard:
        assert reason_of(join, shard, LAYOUT, Identity("anna", "2")) is ErrorCode.WORKER_ALIVE


STATE = {"t0": torch.arange(6.0), "t1": torch.arange(4.0).bfloat16()}


def write_init(path, state):
    modelfile.write(path, state, {})
    return path


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_start_file_makes_every_shard_ready_at_the_first_join(tmp_path, num_shards):
    init = write_init(tmp_path / "start.safetensors", STATE)
    with open_shards(num_shards, init=init) as shards:
        for shard in shards:
            outcome = join(shard, LAYOUT)
            assert (outcome.state, epoch(outcome.generation), outcome.version) == (READY, 1, 0)
        assert torch.cat([theta(shard) for shard in shards]).tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]


@pytest.mark.parametrize("state", [{"t0": STATE["t0"]}, STATE | {"x": torch.ones(1)}, STATE | {"t1": torch.ones(5)}])
def test_a_start_file_that_does_not_fit_is_refused(tmp_path, state):
    with open_shards(init=write_init(tmp_path / "start.safetensors", state)) as (shard,):
        assert reason_of(join, shard, LAYOUT) is ErrorCode.FINGERPRINT_MISMATCH


def test_a_start_file_without_the_buffers_is_refused_unless_there_are_to_be_none(tmp_path):
    init = write_init(tmp_path / "start.safetensors", STATE)
    layout = layout_of((6, F32), (4, BF16), buffers=(TensorSpec("mean", (2,), F32),))
    with open_shards(init=init) as (shard,):
        assert reason_of(join, shard, layout) is ErrorCode.FINGERPRINT_MISMATCH
    with open_shards(init=init, buffers="none") as (shard,):
        assert join(shard, layout).state == READY


def test_a_join_that_is_refused_leaves_no_trace(tmp_path):
    with open_shards(init=write_init(tmp_path / "start.safetensors", STATE)) as (shard,):
        assert reason_of(join, shard, OTHER, BERT, method="asgd") is ErrorCode.FINGERPRINT_MISMATCH
        assert join(shard, LAYOUT, ANNA, method="dgs").state == READY


FRESH, CHECKPOINT, OTHER_ONE = (bytes([number]) * 32 for number in range(3))


def loads(shard, digest, who=ANNA, *, replaces=False):
    return join(shard, LAYOUT, who, has_replica=True, loaded=pb.LoadedModel(digest=digest, replaces=replaces))


def begun(shard):
    upload(shard, ONES, ANNA, join(shard, LAYOUT).generation, digest=FRESH)
    join(shard, LAYOUT, BERT)


def test_a_loaded_model_takes_the_place_of_one_that_nobody_has_pushed_to():
    with open_shards() as (shard,):
        begun(shard)
        granted = loads(shard, CHECKPOINT)
        assert (granted.state, epoch(granted.generation)) == (UPLOAD, 2)
        assert loads(shard, CHECKPOINT, BERT).state == WAIT
        assert join(shard, LAYOUT, BERT).state == READY, "who has loaded nothing goes on meanwhile"
        push(shard, 1, {0: 1.0}, BERT)
        upload(shard, TWOS, ANNA, granted.generation, digest=CHECKPOINT)
        assert torch.equal(theta(shard), TWOS), "a push that comes in between belongs to the model before"
        again = loads(shard, CHECKPOINT, BERT)
        assert (again.state, again.load_refused) == (READY, False)


def test_a_trained_model_stays_unless_it_is_to_be_replaced():
    with open_shards() as (shard,):
        begun(shard)
        push(shard, 1, {0: 1.0})
        before = theta(shard).clone()
        refused = loads(shard, CHECKPOINT)
        assert (refused.state, refused.load_refused) == (READY, True)
        same = loads(shard, FRESH)
        assert (same.state, same.load_refused) == (READY, False), "the run began as it"
        assert torch.equal(theta(shard), before)
        granted = loads(shard, OTHER_ONE, BERT, replaces=True)
        upload(shard, TWOS, BERT, granted.generation, version=0, digest=OTHER_ONE)
        assert (shard.model.version, theta(shard).tolist()) == (1, TWOS.tolist())
        assert loads(shard, OTHER_ONE, replaces=True).state == READY, "once is enough"


def test_an_uploader_that_is_gone_leaves_the_old_model_in_its_place():
    with open_shards() as (shard,):
        begun(shard)
        granted = loads(shard, CHECKPOINT)
        leave(shard, ANNA)
        assert (join(shard, LAYOUT, BERT).state, loads(shard, OTHER_ONE, BERT).state) == (READY, UPLOAD)
        assert reason_of(upload, shard, TWOS, ANNA, granted.generation) is not None
        assert torch.equal(theta(shard), ONES)


def test_a_model_that_goes_on_with_a_training_is_nobodys_beginning():
    with open_shards() as (shard,):
        upload(shard, ONES, ANNA, join(shard, LAYOUT, has_replica=True).generation, version=7)
        assert loads(shard, CHECKPOINT).load_refused


def test_a_join_reads_the_clock_of_leases_as_often_among_many_workers_as_among_few():
    with serving(LAYOUT, ONES) as shard:
        clock, readers = shard.leases.clock, []

        def read():
            readers.append(threading.get_ident())  # the thread of leases reads it, too
            return clock()

        def readings_of_a_join(name):
            readers.clear()
            join(shard, LAYOUT, Identity(name, "1"))
            return readers.count(threading.get_ident())

        shard.leases.clock = read
        few, *_, many = [readings_of_a_join(f"worker-{number}") for number in range(50)]
        assert many == few


def test_an_upload_that_reached_one_shard_alone_is_made_good_by_a_replica():
    with open_shards(2) as (first, second):
        generation = join(first, LAYOUT).generation
        for shard in (second, first):
            join(shard, LAYOUT)
            upload(shard, ONES, ANNA, generation, digest=FRESH)
            join(shard, LAYOUT, BERT)
        granted = loads(first, CHECKPOINT)
        upload(second, TWOS, ANNA, granted.generation)
        seen = join(second, LAYOUT, BERT).generation
        assert join(first, LAYOUT, BERT, seen=seen, has_replica=True).state == WAIT, "Anna is at it"
        leave(first, ANNA)
        assert join(first, LAYOUT, BERT, seen=seen).state == READY, "fresh weights replace nothing"
        mended = join(first, LAYOUT, BERT, seen=seen, has_replica=True)
        assert (mended.state, epoch(mended.generation)) == (UPLOAD, 3)
        for shard in (second, first):
            upload(shard, ONES, BERT, mended.generation)
        assert join(first, LAYOUT, BERT, seen=mended.generation, has_replica=True).state == READY
