"""What shards of a relay tell each other, and what relays tell their sources: bounds, and what follows from it."""

import pytest

from pscore.reader.cut import Cut, ShardVersion
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.feed.relaying import MOST_RELAYS, Relaying
from psservice.rpc.bounds import require


def cut_at(version, shards=3):
    return Cut("run", tuple(ShardVersion(1, version + index, bytes(16)) for index in range(shards)))


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def relaying(clock):
    return Relaying(3, "me", clock)


def test_a_cut_may_be_published_once_every_other_shard_has_it(relaying):
    relaying.hear(1, ["one", "two"], "")
    assert not relaying.others_have("two")
    relaying.hear(2, ["two"], "")
    assert relaying.others_have("two")
    assert not relaying.others_have("one")
    relaying.hear(1, ["three"], "")
    assert not relaying.others_have("two"), "what a shard told last counts: it may have lost the rest"


@pytest.mark.parametrize("index", [0, 3, 4096])
def test_shards_that_there_are_not_are_not_heard(relaying, index):
    relaying.hear(1, ["one"], "")
    relaying.hear(index, ["one"], "one")
    assert not relaying.others_have("one")
    assert not relaying.some_failed("one")


def test_a_failure_counts_for_one_attempt(relaying):
    cut = cut_at(1)
    relaying.hear(2, [], cut.name)
    assert relaying.some_failed(cut.name)
    relaying.aim(cut)
    assert not relaying.some_failed(cut.name)


def test_a_relay_is_behind_until_it_has_the_newest_cut(relaying, clock):
    assert relaying.behind_seconds == 0.0
    relaying.aim(cut_at(1))
    clock.now += 5
    relaying.aim(cut_at(2))
    clock.now += 5
    relaying.publish(cut_at(1).name)
    assert relaying.behind_seconds == 10.0
    assert relaying.source_version(1) == 3
    relaying.publish(cut_at(2).name)
    assert relaying.behind_seconds == 0.0


def test_a_relay_that_has_lost_shard_0_is_not_behind_what_it_has(relaying):
    relaying.aim(cut_at(2))
    relaying.publish(cut_at(2).name)
    relaying.aim_at_nothing()
    assert relaying.target is None
    assert relaying.source_version(0) == 2
    relaying.aim(cut_at(2))
    assert relaying.behind_seconds == 0.0


def test_equal_cuts_have_one_name_and_others_another():
    assert cut_at(1).name == Cut.from_message(cut_at(1).to_message()).name
    others = [
        cut_at(1),
        cut_at(2),
        cut_at(1, 2),
        Cut("other", cut_at(1).shards),
        Cut("run", cut_at(1).shards, b"b" * 16),
    ]
    assert len({each.name for each in others}) == len(others)


def test_relays_that_have_gone_are_told_no_more(relaying, clock):
    relaying.hear_of_relays(["a", "me"])
    clock.now += 30
    relaying.hear_of_relays(["b"])
    assert relaying.relays() == ["me", "b", "a"]
    clock.now += 40
    assert relaying.relays() == ["me", "b"]


def test_readers_that_tell_of_ever_other_relays_do_not_fill_the_memory(relaying, clock):
    for number in range(10):
        clock.now += 1
        relaying.hear_of_relays([f"relay {number} {each}" for each in range(MOST_RELAYS)])
    assert len(relaying._relays) <= 2 * MOST_RELAYS
    assert all(name.startswith("relay 9") for name in relaying.relays()[1:])


def test_no_more_relays_are_told_than_a_source_reads(relaying):
    relaying.hear_of_relays([f"relay {number}" for number in range(2 * MOST_RELAYS)])
    require(pb.AwaitCutRequest(relays=relaying.relays()))


@pytest.mark.parametrize(
    "request_",
    [
        pb.FollowRunRequest(relayed=["a", "b", "c"]),
        pb.FollowRunRequest(relayed=["x" * 300]),
        pb.FollowRunRequest(relayed=["\x1b[2J"]),
        pb.FollowRunRequest(not_relayed="x" * 300),
        pb.FollowRunRequest(not_relayed="two\nlines"),
        pb.AwaitCutRequest(relays=["r"] * (MOST_RELAYS + 1)),
        pb.AwaitCutRequest(relays=[""]),
        pb.AwaitCutRequest(relays=["x" * 300]),
    ],
)
def test_what_no_relay_tells_is_refused(request_):
    with pytest.raises(Rejected) as refused:
        require(request_)
    assert refused.value.reason is ErrorCode.BAD_REQUEST
