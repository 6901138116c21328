"""A publication over the shards of a feed: staged by all, published by shard 0, heard of by the others."""

import pytest
import torch

from pscore.model.layout import ModelLayout, TensorSpec
from pscore.wire import frames
from pscore.wire.errors import ErrorCode
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.awaiting import NotYetError
from psservice.durability.earlier_models import replay_shards
from psservice.replies.reply_session import ReplyMode
from psservice.rpc.auth import ANONYMOUS_ADMIN
from psservice.rpc.calls import Call
from psservice.rpc.workers import WorkerCalls
from psservice.shard.following import follow, news_of
from psservice.shard.join import hear_of_shards
from psservice.shard.publication import publish
from psservice.shard.rollback import abandon, prepare, roll_back
from tests.psservice.feed_makers import ASSIGN, FEED, changes, feeding, publish_at, stage, whole, words
from tests.psservice.service_makers import F32, bits, chunks_of, layout_of
from tests.psservice.shard_makers import ANNA, BERT, join, open_shards, present, pull, push, reason_of, serving, theta


@pytest.fixture
def shards():
    with feeding(2) as found:
        yield found


def stage_everywhere(shards, step, base, values=None):
    for shard in shards:
        update = changes(shard.span, {step: step}) if values is None else whole(shard.span, values)
        assert stage(shard, step, update, base).version == base + 1


def versions(shards):
    return [shard.model.version for shard in shards]


def test_a_version_is_staged_published_and_heard_of(shards):
    zero, one = shards
    stage_everywhere(shards, 1, 0)
    assert versions(shards) == [0, 0]
    follow(one, news_of(zero))
    assert versions(shards) == [0, 0]  # staged, and no news
    assert publish_at(zero, 1) == 1
    assert versions(shards) == [1, 0]
    follow(one, news_of(zero))
    follow(one, news_of(zero))
    assert versions(shards) == [1, 1]
    for shard in shards:
        assert theta(shard)[1] == 1
        assert shard.metrics.version == 1


def test_a_version_is_published_once(shards):
    zero, _ = shards
    stage_everywhere(shards, 1, 0)
    assert [publish_at(zero, 1) for _ in range(3)] == [1, 1, 1]
    stage_everywhere(shards[:1], 2, 1)
    assert publish_at(zero, 1) == 1  # a repeat that comes late publishes nothing else
    assert versions(shards) == [1, 0]
    assert publish_at(zero, 2) == 2
    assert reason_of(publish_at, zero, 1) is ErrorCode.TOO_STALE


def test_what_is_not_staged_is_not_published(shards):
    zero, _ = shards
    for version in (1, 2):
        assert reason_of(publish_at, zero, version) is ErrorCode.TOO_STALE
    stage_everywhere(shards, 1, 0)
    assert reason_of(publish_at, zero, 2) is ErrorCode.TOO_STALE
    assert versions(shards) == [0, 0]


def test_who_has_no_lease_or_means_another_model_publishes_nothing(shards):
    zero, _ = shards
    stage_everywhere(shards, 1, 0)
    assert reason_of(publish_at, zero, 1, BERT) is ErrorCode.LEASE_EXPIRED
    assert reason_of(publish, zero, ANNA, present(zero) + 1, 1) is ErrorCode.STALE_GENERATION
    assert versions(shards) == [0, 0]


def test_a_repeated_push_is_answered_and_staged_once(shards):
    zero, _ = shards
    first = stage(zero, 1, changes(zero.span, {1: 11}), 0)
    assert stage(zero, 1, changes(zero.span, {2: 12}), 0) == first
    publish_at(zero, 1)
    assert theta(zero)[1] == 11
    assert theta(zero)[2] == words()[2]


def test_staged_words_are_replaced_and_readers_of_the_model_see_none_of_them(shards):
    zero, _ = shards
    stage(zero, 1, whole(zero.span, words(1)), 0)
    stage(zero, 2, changes(zero.span, {1: 11}), 0)
    assert bits(theta(zero)) == bits(words()[: zero.span.length])
    publish_at(zero, 1)
    expected = words()[: zero.span.length].clone()
    expected[1] = 11
    assert bits(theta(zero)) == bits(expected)


@pytest.mark.parametrize("base", [0, 2, 3])
def test_differences_from_another_version_are_too_stale(shards, base):
    zero, _ = shards
    stage_everywhere(shards, 1, 0)
    publish_at(zero, 1)
    for update in (changes(zero.span, {1: 1}), None):
        assert reason_of(stage, zero, 2, update, base) is ErrorCode.TOO_STALE
    assert zero.model.staged.version == 0


def test_all_words_may_be_ahead_of_a_shard_and_not_behind_it(shards):
    zero, _ = shards
    stage_everywhere(shards, 1, 0)
    publish_at(zero, 1)
    assert reason_of(stage, zero, 2, whole(zero.span, words(1)), 0) is ErrorCode.TOO_STALE
    assert stage(zero, 2, whole(zero.span, words(1)), 5).version == 6
    assert publish_at(zero, 6) == 6
    assert bits(theta(zero)) == bits(words(1)[: zero.span.length])


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_push_waits_until_its_shard_has_heard_of_the_version_before(shards, is_whole):
    zero, one = shards
    stage_everywhere(shards, 1, 0)
    publish_at(zero, 1)
    update = whole(one.span, words(2)) if is_whole else changes(one.span, {2: 2})
    with pytest.raises(NotYetError) as waits:
        stage(one, 2, update, 1)
    assert not waits.value.is_over()
    assert (one.model.version, one.model.staged.version) == (0, 1)
    follow(one, news_of(zero))
    assert waits.value.is_over()
    assert stage(one, 2, update, 1).version == 2


def test_a_wait_ends_with_the_model(tmp_path):
    with feeding(2, data_dir=tmp_path) as (zero, one):
        one.durability.take()
        stage_everywhere((zero, one), 1, 0)
        with pytest.raises(NotYetError) as waits:
            stage(one, 2, changes(one.span, {2: 2}), 1)
        roll_back(one, 0, "")
        assert waits.value.is_over()


@pytest.mark.parametrize("is_whole", [False, True])
def test_shard_0_waits_for_nobody_who_would_publish_what_it_has_staged(shards, is_whole):
    """Shard 0 has lost the record of version 1, which another shard has heard of, and its publisher is gone."""
    zero, one = shards
    stage_everywhere(shards, 1, 0)
    news = pb.RunNews(run_id="feed", run_state=pb.RUN_STATE_TRAINING, published=1, publication=one.model.staged.name)
    follow(one, news)
    assert versions(shards) == [0, 1]
    if not is_whole:
        assert reason_of(stage, zero, 2, changes(zero.span, {2: 2}), 1) is ErrorCode.TOO_STALE
        return
    stage_everywhere(shards, 2, 1, words(2))
    publish_at(zero, 2)
    follow(one, news_of(zero))
    assert versions(shards) == [2, 2]
    assert bits(torch.cat([theta(shard) for shard in shards])) == bits(words(2))


def test_a_shard_that_lacks_a_version_says_so_once_and_is_whole_with_the_next(shards, caplog):
    zero, one = shards
    stage(zero, 1, changes(zero.span, {1: 1}), 0)
    publish_at(zero, 1)
    for _ in range(3):
        follow(one, news_of(zero))
    assert versions(shards) == [1, 0]
    assert one.model.lacks == 1
    assert sum("lacks a version of the feed" in record.message for record in caplog.records) == 1
    assert reason_of(stage, one, 2, changes(one.span, {1: 1}), 1) is ErrorCode.TOO_STALE
    stage_everywhere(shards, 3, 1, words(3))
    publish_at(zero, 2)
    follow(one, news_of(zero))
    assert versions(shards) == [2, 2]
    assert bits(torch.cat([theta(shard) for shard in shards])) == bits(words(3))


def test_a_publication_that_took_another_ones_place_under_its_number_is_not_taken_for_it(shards):
    """Shard 0 has published version 1 of a publisher that died; neither the next one nor the other shard knows."""
    zero, one = shards
    stage_everywhere(shards, 1, 0, words(1))
    publish_at(zero, 1)
    assert reason_of(stage, zero, 2, whole(zero.span, words(2)), 0) is ErrorCode.TOO_STALE
    assert stage(one, 2, whole(one.span, words(2)), 0).version == 1
    follow(one, news_of(zero))
    assert (versions(shards), one.model.lacks) == ([1, 0], 1)
    stage_everywhere(shards, 3, 1, words(2))
    publish_at(zero, 2)
    follow(one, news_of(zero))
    assert versions(shards) == [2, 2]
    assert bits(torch.cat([theta(shard) for shard in shards])) == bits(words(2))


def publish_everywhere(shards, step, base, values):
    stage_everywhere(shards, step, base, values)
    publish_at(shards[0], base + 1)
    follow(shards[1], news_of(shards[0]))
    assert versions(shards) == [base + 1] * 2


def test_a_shard_that_lacks_a_version_does_not_go_back_to_another_one_of_its_number(tmp_path):
    with feeding(2, data_dir=tmp_path) as shards:
        zero, one = shards
        for version in (1, 2, 3):
            publish_everywhere(shards, version, version - 1, words(version))
        for shard in shards:
            roll_back(shard, 1, "")
        stage_everywhere(shards, 4, 1, words(4))
        publish_at(zero, 2)  # shard 1 does not hear of it before the publisher has died, and another one publishes
        stage(zero, 5, whole(zero.span, words(5)), 2)
        stage(one, 5, whole(one.span, words(5)), 2, may_wait=False)
        publish_at(zero, 3)
        follow(one, news_of(zero))
        assert versions(shards) == [3, 3]
        first = prepare(zero, 2, "")
        assert bits(first.prepared.state.model.theta) == bits(words(4)[: zero.span.length])
        alone = prepare(one, 2, "")
        assert bits(alone.prepared.state.model.theta) == bits(words(2)[one.span.start :])  # of the older history
        assert alone.publication != first.publication
        abandon(one, alone.ticket)
        other = prepare(one, 2, "", first.publication)  # which it had staged
        assert bits(other.prepared.state.model.theta) == bits(words(4)[one.span.start :])
        abandon(one, other.ticket)
        never = first.publication.replace("-2-", "-3-")
        assert reason_of(prepare, one, 3, "", never) is ErrorCode.NO_SUCH_CHECKPOINT


def test_a_shard_goes_back_to_what_it_has_staged_if_shard_0_has_published_that(tmp_path):
    with feeding(2, data_dir=tmp_path) as shards:
        zero, one = shards
        publish_everywhere(shards, 1, 0, words(1))
        stage_everywhere(shards, 2, 1, words(2))
        publish_at(zero, 2)
        assert versions(shards) == [2, 1]
        first = prepare(zero, 2, "")
        other = prepare(one, 2, "", first.publication)
        assert (other.version, other.publication) == (2, first.publication)
        found = [each.prepared.state.model for each in (first, other)]
        assert bits(torch.cat([model.theta for model in found])) == bits(words(2))
        assert [model.staged.version for model in found] == [0, 0]


def test_a_model_from_a_directory_is_one_publication(tmp_path):
    with feeding(2, data_dir=tmp_path) as shards:
        zero = shards[0]
        publish_everywhere(shards, 1, 0, words(1))
        zero.durability.take_asked("torn")
        stage_everywhere(shards, 2, 1, words(2))
        publish_at(zero, 2)
        for version, checkpoint, expected in ((None, "", 2), (2, "", 2), (1, "", 1), (None, "torn", 1)):
            found = replay_shards(tmp_path, version, checkpoint)
            assert bits(torch.cat([shard.model.theta for shard in found])) == bits(words(expected))
        assert versions(shards) == [2, 1]


def test_a_shard_that_hears_later_has_lost_nothing(shards, caplog):
    zero, one = shards
    stage_everywhere(shards, 1, 0)
    publish_at(zero, 1)
    told = [pb.ShardHistory(shard_index=1, generation=present(one), version=1)]  # by the publisher
    for shard in shards:
        hear_of_shards(shard, told)
        assert not shard.state.histories.known()
    assert not [record for record in caplog.records if "taken back" in record.message]


def test_a_wait_ends_when_another_publication_turns_out_to_be_published(shards):
    zero, one = shards
    stage_everywhere(shards, 1, 0)
    publish_at(zero, 1)
    stage(one, 2, changes(one.span, {2: 2}), 0)
    with pytest.raises(NotYetError) as waits:
        stage(one, 3, whole(one.span, words(3)), 1)
    follow(one, news_of(zero))
    assert waits.value.is_over()
    assert stage(one, 3, whole(one.span, words(3)), 1).version == 2


def test_a_wait_for_a_version_that_shard_0_has_lost_ends_with_its_time(shards):
    _, one = shards
    stage(one, 1, changes(one.span, {1: 1}), 0)
    assert reason_of(stage, one, 2, changes(one.span, {2: 2}), 1, may_wait=False) is ErrorCode.TOO_STALE
    assert stage(one, 3, whole(one.span, words(3)), 1, may_wait=False).version == 2


def test_a_restore_drops_what_was_staged_then(tmp_path):
    with feeding(2, data_dir=tmp_path) as (zero, one):
        stage_everywhere((zero, one), 1, 0)
        assert one.durability.take() is not None
        publish_at(zero, 1)
        news = news_of(zero)
        roll_back(one, 0, "")
        assert one.model.staged.version == 0
        follow(one, news)
        assert one.model.version == 0


def test_news_of_an_older_version_change_nothing(shards):
    zero, one = shards
    stage_everywhere(shards, 1, 0)
    publish_at(zero, 1)
    old = news_of(zero)
    follow(one, old)
    stage_everywhere(shards, 2, 1)
    publish_at(zero, 2)
    follow(one, news_of(zero))
    follow(one, old)
    assert versions(shards) == [2, 2]
    assert one.model.lacks == 0


def test_a_run_that_trains_publishes_nothing():
    layout = layout_of((6, F32))
    with serving(layout, torch.zeros(6), run_id="feed") as shard:
        push(shard, 1, {1: 1.0})
        assert news_of(shard).published == 0
        for version in (1, 2):
            assert reason_of(publish, shard, ANNA, present(shard), version) is ErrorCode.BAD_REQUEST
        follow(shard, pb.RunNews(run_id="feed", run_state=pb.RUN_STATE_TRAINING, published=2))
        assert shard.model.version == 1


@pytest.mark.parametrize("down_mode", ["auto", "exact", "topk"])
def test_a_worker_that_pulls_gets_every_word_exactly(down_mode):
    with feeding(down_mode=down_mode, exact_limit=1e-6) as (shard,):
        held, base, number = torch.zeros_like(words()), None, 0
        for step in range(1, 8):
            entries = {step: step, 60: -step}
            update = whole(shard.span, words(step)) if step % 3 == 0 else changes(shard.span, entries)
            stage(shard, 2 * step, update, step - 1)
            publish_at(shard, step)
            stage(shard, 2 * step + 1, whole(shard.span, words(99)), step)  # which nobody is to get
            reply = pull(shard, base=base, acknowledged=number)
            assert (reply.mode, reply.image) == (ReplyMode.EXACT, False)
            reader = frames.ChunkReader(shard.span, dtype=torch.int16)
            for part in map(reader.read, chunks_of(reply)):
                start = part.span.start
                place = slice(start, part.span.end) if part.offsets is None else part.offsets + start
                held[place] = part.values
            base, number = reply.version, reply.number
            assert base == step
            assert bits(held) == bits(theta(shard))


def test_only_shard_0_publishes(shards):
    identity = pb.WorkerIdentity(run_id="feed", worker_id=ANNA.worker_id, incarnation=ANNA.incarnation)
    stage_everywhere(shards, 1, 0)
    for shard in reversed(shards):
        calls = WorkerCalls(shard)
        request = pb.PublishRequest(identity=identity, generation=present(shard), version=1)
        call = Call("Publish", ANONYMOUS_ADMIN)
        if shard.is_coordinator:
            assert calls.publish(call, request).version == 1
        else:
            assert reason_of(calls.publish, call, request) is ErrorCode.SHARD_MISMATCH
    assert versions(shards) == [1, 0]


@pytest.mark.parametrize("is_published", [False, True])
def test_a_restart_finds_what_was_staged_and_what_was_published(tmp_path, is_published):
    with feeding(data_dir=tmp_path) as (shard,):
        stage(shard, 1, changes(shard.span, {1: 1}), 0)
        publish_at(shard, 1)
        stage(shard, 2, whole(shard.span, words(2)), 1)
        assert shard.durability.take() is not None
        if is_published:
            publish_at(shard, 2)
        expected = bits(theta(shard))
    with open_shards(run_id="feed", data_dir=tmp_path) as (again,):
        assert bits(theta(again)) == expected
        assert (again.model.version, again.model.staged.version) == ((2, 0) if is_published else (1, 2))
        join(again, FEED, ANNA, "feed", ASSIGN)
        assert publish_at(again, 2) == 2
        assert bits(theta(again)) == bits(words(2))


def test_words_go_with_the_rule_that_assigns_and_nothing_else_does():
    numbers = layout_of((6, F32))
    with open_shards() as (shard,):
        for layout, settings in ((FEED, {}), (FEED, {"update": "rmsprop"}), (numbers, ASSIGN)):
            assert reason_of(join, shard, layout, ANNA, "feed", settings) is ErrorCode.BAD_REQUEST
        assert shard.state.layout is None
        join(shard, FEED, ANNA, "feed", ASSIGN)
        assert reason_of(join, shard, numbers, BERT, "feed", ASSIGN) is ErrorCode.FINGERPRINT_MISMATCH


def test_a_feed_of_fewer_elements_than_shards_is_refused():
    layout = ModelLayout((TensorSpec("wide", (2,), torch.int64),), word_bytes=2)
    with open_shards(2) as (shard, _):
        join(shard, layout, ANNA, "feed", ASSIGN)
    with open_shards(3) as (shard, *_):
        assert reason_of(join, shard, layout, ANNA, "feed", ASSIGN) is ErrorCode.BAD_REQUEST
