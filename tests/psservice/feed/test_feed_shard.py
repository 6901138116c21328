"""A shard of a feed by itself: words wait staged until they are published, and then are the feed's, bit by bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.wire.errors import ErrorCode
from psservice.feed.feed_shard import FeedShard
from psservice.model.training_mode import TrainingMode
from psservice.rules.base import PushContext
from tests.psservice.feed_makers import FEED, changes, feed_of, whole, words
from tests.psservice.service_makers import bits
from tests.psservice.shard_makers import reason_of
from tests.tiers import examples

VALUES = words()


@pytest.fixture
def feed():
    return feed_of(FeedShard, VALUES)


def stage(feed, update, base):
    return feed.take("publisher", update, PushContext(base_version=base))


@given(
    publications=st.lists(
        st.dictionaries(st.integers(0, FEED.size - 1), st.integers(-(2**15), 2**15 - 1)) | st.integers(0, 99),
        max_size=8,
    )
)
@settings(deadline=None, max_examples=examples(60))
def test_words_are_the_ones_that_were_published_last(publications):
    feed, expected = feed_of(FeedShard, VALUES), VALUES.clone()
    for version, publication in enumerate(publications, start=1):
        before = bits(feed.theta)
        if isinstance(publication, int):
            update = whole(feed.span, words(publication))
            expected = words(publication)
        else:
            update = changes(feed.span, publication)
            for place, word in publication.items():
                expected[place] = word
        assert stage(feed, update, version - 1) == version
        assert (bits(feed.theta), feed.version) == (before, version - 1)
        assert feed.publish() == version == feed.version
        assert bits(feed.theta) == bits(expected)


def test_what_is_staged_again_takes_the_place_of_what_was(feed):
    stage(feed, changes(feed.span, {1: 11, 2: 12}), 0)
    stage(feed, changes(feed.span, {3: 13}), 0)
    feed.publish()
    expected = VALUES.clone()
    expected[3] = 13
    assert bits(feed.theta) == bits(expected)


def test_nothing_is_published_twice_or_without_being_staged(feed):
    with pytest.raises(ValueError, match="nothing is staged"):
        feed.publish()
    stage(feed, None, 0)
    assert feed.publish() == 1
    with pytest.raises(ValueError, match="nothing is staged"):
        feed.publish()
    assert feed.version == 1


def test_what_is_staged_has_memory_of_its_own(feed):
    update = changes(feed.span, {1: 11})
    stage(feed, update, 0)
    update.values.fill_(-1)
    update.offsets.fill_(5)
    feed.publish()
    assert feed.theta[1] == 11


def test_a_version_behind_those_that_a_shard_lacks_is_published_by_its_number(feed):
    assert stage(feed, whole(feed.span, words(7)), 4) == 5
    assert feed.version == 0
    assert feed.publish() == 5
    assert bits(feed.theta) == bits(words(7))
    assert feed.changelog.since(0) == [None]  # all
    stage(feed, changes(feed.span, {2: 3}), 5)
    feed.publish()
    assert feed.changelog.since(5) is not None


@pytest.mark.parametrize(
    "update", [lambda span: None, lambda span: changes(span, {4: 9}), lambda span: whole(span, words(3))]
)
@pytest.mark.parametrize("is_published", [False, True])
def test_an_exported_feed_goes_on_as_itself(feed, update, is_published):
    stage(feed, update(feed.span), 0)
    if is_published:
        feed.publish()
    again = feed_of(FeedShard, feed.theta)
    again.version = feed.version
    again.restore(feed.export())
    assert again.staged.version == feed.staged.version == (0 if is_published else 1)
    if not is_published:
        assert again.publish() == feed.publish() == 1
    assert bits(again.theta) == bits(feed.theta)


def test_what_is_overwritten_is_kept_for_an_open_copy(feed):
    copy = feed.open_values()
    stage(feed, changes(feed.span, {1: 11, 30: 12}), 0)
    feed.publish()
    assert bits(copy.read(0, FEED.size)) == bits(VALUES)
    copy.close()


def test_a_server_that_would_compensate_delays_has_nothing_to_compensate_in_a_feed():
    feed = feed_of(FeedShard, VALUES, delay_compensation=0.5)
    for version in range(3):
        stage(feed, changes(feed.span, {version: 5}), version)
        feed.publish()
    stage(feed, whole(feed.span, words(3)), 3)
    assert feed.publish() == 4
    assert bits(feed.theta) == bits(words(3))


def test_a_feed_has_neither_rounds_nor_groups():
    feed = TrainingMode.of({"update": "assign"})
    assert (feed.is_feed, feed.rounds, feed.groups, feed.is_asynchronous) == (True, None, None, False)
    rounds = '{"quorum": 0, "seconds": 0, "start_workers": 1}'
    assert reason_of(TrainingMode.of, {"update": "assign", "rounds": rounds}) is ErrorCode.BAD_REQUEST
    assert not TrainingMode.of({}).is_feed


def test_words_are_assigned_and_nothing_is_computed_of_them(feed):
    nan = torch.tensor([0x7FC1, -0x7FFF, 0], dtype=torch.int16)  # a payload, and a negative subnormal
    update = changes(feed.span, {0: 0x7FC1, 1: -0x7FFF, 2: 0})
    stage(feed, update, 0)
    feed.publish()
    assert torch.equal(feed.theta[:3], nan)
