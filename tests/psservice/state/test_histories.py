"""What shards know of one another, and when one of them has lost something."""

from hypothesis import given
from hypothesis import strategies as st

from pscore.wire.histories import MOST_ORIGINS, losses, lost_versions
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.state.histories import Histories

OLD, NEW = 1 << 32 | 7, 1 << 32 | 9
versions = st.integers(0, 1 << 53)


def history(generation, version, *origins, index=1, lost=0):
    return pb.ShardHistory(
        shard_index=index, generation=generation, version=version, origins=origins, lost_versions=lost
    )


def origin(generation, version, checkpoint=""):
    return pb.ShardOrigin(generation=generation, version=version, checkpoint=checkpoint)


@given(versions, versions, versions)
def test_versions_are_lost_where_the_histories_part_before_what_was_seen(seen, parted, now):
    assert lost_versions(history(OLD, seen), history(NEW, now, origin(OLD, parted))) == max(0, seen - parted)
    assert lost_versions(history(OLD, seen), history(OLD, now)) == 0  # a slow worker tells of an old version
    assert lost_versions(history(OLD, seen), history(NEW, now)) == 0  # another upload, or a restore of all


def test_two_shards_that_went_back_to_one_checkpoint_belong_together():
    known, now = history(OLD, 12), history(NEW, 20, origin(OLD, 10, "nightly"))
    assert lost_versions(known, now, [origin(OLD, 9, "nightly")]) == 0
    assert lost_versions(known, now, [origin(OLD, 9, "weekly")]) == 2
    assert lost_versions(known, history(NEW, 20, origin(OLD, 10)), [origin(OLD, 9)]) == 2


def test_losses_are_those_of_each_shard_that_somebody_has_seen_more_of():
    now = [history(NEW, 20, origin(OLD, 10), index=0), history(OLD, 40, index=1), history(OLD, 40, index=2)]
    known = [[history(OLD, 39, index=1)], [history(OLD, 30, index=0)], [history(OLD, 25, index=0)]]
    assert losses(zip(now, known, strict=True)) == {0: 20}
    assert losses([(now[1], [history(NEW, 21, index=0, lost=20)])]) == {0: 20}  # told before, of a shard that is away


def test_a_shard_keeps_the_newest_of_what_it_hears_and_tells_once_what_is_new():
    histories = Histories()
    assert [histories.hear(history(OLD, version)) for version in (5, 3, 8)] == [0, 0, 0]
    assert [each.version for each in histories.heard()] == [8]
    histories.apply(histories.heard())
    assert histories.heard() == []
    assert histories.hear(history(NEW, 7, origin(OLD, 6))) == 2
    assert histories.hear(history(OLD, 9)) == 0  # of a worker that has not joined again yet
    assert [(each.generation, each.version, each.lost_versions) for each in histories.known()] == [(NEW, 7, 2)]
    assert histories.lost() == {"1": 2.0}
    again = Histories(known=histories.known())
    assert (again.known(), again.lost()) == (histories.known(), histories.lost())
    replayed = Histories()
    replayed.apply(histories.heard())
    assert (replayed.known(), replayed.lost()) == (histories.known(), histories.lost())


def test_a_shard_hears_that_it_has_fewer_versions_than_others_have_seen_of_it():
    histories = Histories()
    assert histories.hear_of_itself(history(OLD, 5), OLD, 5) == 0
    assert histories.hear_of_itself(history(NEW, 9), OLD, 5) == 0
    assert histories.hear_of_itself(history(OLD, 9), OLD, 5) == 4
    assert histories.hear_of_itself(history(OLD, 9), OLD, 6) == 0  # said already
    assert histories.lost() == {"1": 4.0}


def test_the_newest_origins_are_kept():
    histories = Histories()
    for version in range(2 * MOST_ORIGINS):
        histories.branch(OLD, version, "")
    assert [each.version for each in histories.origins] == [*range(MOST_ORIGINS, 2 * MOST_ORIGINS)]


def test_a_successor_is_a_history_that_has_begun_with_the_shards_own_and_no_worker_tells_of_one():
    begun = history(NEW, 9)
    begun.origins.add(generation=OLD, version=5)
    histories = Histories()
    assert histories.hear_of_itself(begun, OLD, 5) == 0
    assert not histories.successor(begun.shard_index, OLD), "told by a worker"
    histories.hear_of_successor(begun)
    assert histories.successor(begun.shard_index, OLD) == NEW
    assert not histories.successor(begun.shard_index, NEW)
    made_up = history(OLD, 9)
    made_up.origins.add(generation=OLD, version=1)
    others = Histories()
    assert others.hear_of_itself(made_up, OLD, 5) == 4
    assert not others.successor(made_up.shard_index, OLD)
