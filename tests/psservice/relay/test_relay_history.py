"""A relay's shard has what its source has, or what it had before; and a replay has the same, bit for bit."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.buffers import pack
from pscore.reader.cut import Cut
from pscore.wire.errors import Rejected
from tests.psservice.durability.test_recovery import LAYOUT, START, values
from tests.psservice.feed_makers import FEED, words
from tests.psservice.relay_makers import MadeSource, RelayHistory
from tests.tiers import examples

SOURCES = {
    "run": lambda: MadeSource(LAYOUT, values().half().bfloat16().float(), shards=2),
    "feed": lambda: MadeSource(FEED, words(), shards=1),
}
ACTIONS = (
    "change",
    "jump",
    "go back",
    "replace",
    "buffers",
    "others",
    "snapshot",
    "kill",
    "away",
    "lie",
    "fetch",
    "publish",
    "follow",
)
steps = st.lists(st.tuples(st.sampled_from(("change", *ACTIONS)), st.integers(0, 10_000)), max_size=30)


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level("CRITICAL")


def act(history, what, seed):
    source = history.source
    if what in ("change", "jump"):
        source.change(seed, jump=1 if what == "change" else 1 + seed % 5)
    elif what == "go back":
        source.go_back(seed)
    elif what == "buffers" and source.buffers:
        source.buffers = pack([tensor + seed % 3 for tensor in START])
    elif what == "replace":
        source.replace(seed)
    elif what == "others":
        source.ahead = seed % 3
    elif what == "snapshot":
        history.shard.durability.take()
    elif what == "kill":
        history.kill()
    elif what == "away":
        source.is_away = not source.is_away


@pytest.mark.parametrize("kind", SOURCES)
@given(script=steps)
@settings(deadline=None, max_examples=examples(25))
def test_a_relay_has_a_cut_of_its_source_whole_and_so_has_its_replay(kind, script):
    history = RelayHistory(SOURCES[kind]())
    staged = published = None
    for what, seed in [*script, ("follow", 0)]:
        with suppress(Rejected):  # there is no model to take a snapshot of
            act(history, what, seed)
        if what != "publish":
            cut = history.source.cut()
            with suppress(Rejected):  # the source is away, or lies
                history.lied_to() if what == "lie" else history.fetch()
                staged, published = cut, published or cut  # the first is published at once
        if what not in ("fetch", "lie") and staged is not None:
            history.publish(staged)
            published = staged
        if published is not None:
            assert history.is_at(published)
            assert {*history.shard.model.cuts_here()} == {published.name, staged.name}
    history.kill()


def test_all_of_a_generation_comes_once():
    history = RelayHistory(SOURCES["feed"]())
    for number in range(6):
        history.source.change(number + 5, jump=number + 1)
        history.follow()
        if number % 2:
            history.kill()
    assert history.source.whole_replies == 1
    history.source.go_back(1)
    history.follow()
    assert history.source.whole_replies == 2


def test_buffers_that_change_alone_come_alone():
    history = RelayHistory(SOURCES["run"]())
    history.follow()
    history.source.buffers = pack([tensor + 1 for tensor in START])
    history.follow()
    assert pack(history.shard.buffers_now()[spec.name] for spec in LAYOUT.buffers) == history.source.buffers
    assert history.source.whole_replies == 1


def test_what_was_refused_is_fetched_anew():
    history = RelayHistory(SOURCES["run"]())
    history.follow()
    before = history.snapshot()
    history.source.change(7)
    with pytest.raises(Rejected, match="digest"):
        history.lied_to()
    assert history.snapshot() == before
    history.follow()
    assert history.is_at(history.source.cut())


def test_a_relay_whose_own_values_are_not_what_it_takes_them_for_fetches_all():
    """As after damage that its disk did not notice."""
    history = RelayHistory(SOURCES["run"]())
    history.follow()
    history.shard.model.theta[3] += 1
    history.relay._digests = {}  # as after a restart
    history.source.change(7)
    with pytest.raises(Rejected, match="digest"):
        history.follow()
    history.follow()
    assert history.is_at(history.source.cut())
    assert history.source.whole_replies == 2


def test_a_version_that_a_relay_has_jumped_over_is_said_to_be_missing_between_its_neighbours():
    history = RelayHistory(SOURCES["feed"]())
    for jump in (1, 4, 1):  # versions 4, 8, 9
        history.source.change(7, jump=jump)
        history.follow()
    replay_to = history.shard.durability.replay_to
    assert replay_to(8, "").model.version == 8
    with pytest.raises(Rejected, match="version 6 is not covered: version 4 is followed by 8"):
        replay_to(6, "")
    with pytest.raises(Rejected, match="version 12 is not covered: there are 4 to 9"):
        replay_to(12, "")


def test_a_staged_model_of_another_generation_goes_on_by_differences():
    history = RelayHistory(SOURCES["run"]())
    history.follow()
    published = history.source.cut()
    history.source.go_back(1)
    history.fetch()
    for seed in (5, 6):
        history.source.change(seed)
        newest = history.fetch()
        history.kill()
        assert history.is_at(published), "until all shards have the other one"
    assert history.source.whole_replies == 2
    history.publish(newest)
    assert history.is_at(newest)
    history.kill()
    assert history.is_at(newest)


def test_a_cut_that_is_not_wanted_any_more_is_not_staged():
    """Or a shard could lack what it has told a shard 0 that has begun anew."""
    history = RelayHistory(SOURCES["run"]())
    history.follow()
    history.source.change(7)
    cut, before = history.source.cut(), history.snapshot()
    for forget in (history.shard.relaying.aim_at_nothing, lambda: history.shard.relaying.aim(cut_of_another_run(cut))):
        forget()
        with pytest.raises(Rejected, match="wanted"):
            history.relay.fetch(cut)
        assert history.snapshot() == before


def cut_of_another_run(cut):
    return Cut("another", cut.shards, cut.buffers_digest)
