"""Membership: leases by the clock, one incarnation a name, and a record that outlives the lease."""

import pytest

from pscore.wire.errors import ErrorCode, Rejected
from psservice.membership.leases import Leases, ServingClock
from psservice.replies.reply_mode import ReplyRule
from psservice.state.pushes import OwnVersions, Pushes
from psservice.state.workers import Worker
from psservice.values import Identity, PushAnswer

LEASE = 10.0
ANNA, ANNA_AGAIN, BERT = Identity("anna", "1"), Identity("anna", "2"), Identity("bert", "1")


class Clock:
    def __init__(self):
        self.now = 100.0
        self.readings = 0

    def __call__(self):
        self.readings += 1
        return self.now


class World:
    def __init__(self):
        self.clock = Clock()
        self.members = Leases(LEASE, lambda: ReplyRule("exact"), self.clock)
        self.pushes = Pushes(self.clock)

    def join(self, identity):
        return self.members.require_free(identity) or self.members.grant(Worker(identity))


@pytest.fixture
def world():
    return World()


def reason_of(call):
    with pytest.raises(Rejected) as refused:
        call()
    return refused.value.reason


@pytest.mark.parametrize(
    ("gaps", "counted"), [([0.5, 1.0, 0.25], 1.75), ([0.5, 100.0, 0.5], 2.0), ([], 0.0), ([1000.0], 1.0)]
)
def test_time_in_which_the_process_stands_still_does_not_count(gaps, counted):
    clock = Clock()
    serving = ServingClock(1.0, clock)
    for gap in gaps:
        clock.now += gap
        serving()
    assert serving() == counted


def test_a_lease_lives_its_seconds_and_not_longer(world):
    world.join(ANNA)
    world.clock.now += LEASE - 0.001
    assert world.members.is_live(ANNA)
    world.clock.now += 0.001
    assert not world.members.is_live(ANNA)
    assert len(world.members) == 0


@pytest.mark.parametrize("renew", ["require", "require_free"])
def test_every_call_renews_it(world, renew):
    member = world.join(ANNA)
    for _ in range(5):
        world.clock.now += 0.9 * LEASE
        assert getattr(world.members, renew)(ANNA) is member


def test_asking_whether_one_lives_renews_nothing(world):
    world.join(ANNA)
    for _ in range(4):
        world.clock.now += LEASE / 4
        world.members.is_live(ANNA)
        world.members.members()
    assert not world.members.is_live(ANNA)


def test_all_who_have_a_lease_are_found_at_one_reading_of_the_clock(world):
    crowd = [Identity(f"worker-{number}", "1") for number in range(50)]
    for identity in crowd:
        world.join(identity)
    world.join(ANNA)
    world.clock.now += LEASE
    world.join(ANNA_AGAIN)
    readings = world.clock.readings
    assert {*crowd, ANNA, ANNA_AGAIN, BERT} - world.members.identities() == {*crowd, ANNA, BERT}
    assert world.clock.readings == readings + 1


def test_the_end_frees_what_is_kept_and_is_told_once(world):
    first = world.join(ANNA)
    world.clock.now += LEASE
    assert world.members.pop_ended() == [first]
    assert world.members.pop_ended() == []
    again = world.join(ANNA)
    assert again is not first
    assert again.downlink is not first.downlink
    assert again.downlink.image is None


def test_without_a_lease_one_must_join_first(world):
    assert reason_of(lambda: world.members.require(ANNA)) is ErrorCode.LEASE_EXPIRED
    world.join(ANNA)
    assert reason_of(lambda: world.members.require(ANNA_AGAIN)) is ErrorCode.LEASE_EXPIRED
    world.clock.now += LEASE
    assert reason_of(lambda: world.members.require(ANNA)) is ErrorCode.LEASE_EXPIRED


def test_a_living_name_belongs_to_one_incarnation(world):
    world.join(ANNA)
    world.clock.now += 4
    with pytest.raises(Rejected) as refused:
        world.join(ANNA_AGAIN)
    assert refused.value.reason is ErrorCode.WORKER_ALIVE
    assert float(refused.value.metadata["lease_seconds"]) == pytest.approx(LEASE - 4)
    assert 0 < refused.value.retry_seconds <= LEASE


@pytest.mark.parametrize("how", ["leaves", "expires"])
def test_another_incarnation_may_join_when_the_first(world, how):
    world.join(ANNA)
    if how == "leaves":
        assert world.members.leave(ANNA)
    else:
        world.clock.now += LEASE
    assert world.join(ANNA_AGAIN).identity == ANNA_AGAIN
    assert not world.members.leave(ANNA), "the first one has nothing left to end"
    assert world.members.is_live(ANNA_AGAIN)


def test_leaving_twice_is_harmless(world):
    world.join(ANNA)
    assert [world.members.leave(ANNA), world.members.leave(ANNA)] == [True, False]
    assert world.members.pop_ended() == []


def test_one_end_does_not_touch_the_others(world):
    world.join(ANNA)
    world.clock.now += 6
    world.join(BERT)
    world.clock.now += 6
    assert [member.identity for member in world.members.members()] == [BERT]


def test_members_come_by_name(world):
    for identity in (BERT, ANNA):
        world.join(identity)
    assert [member.identity for member in world.members.members()] == [ANNA, BERT]


@pytest.mark.parametrize("how", ["leaves", "expires"])
def test_the_record_of_the_last_push_survives_a_worker_that(world, how):
    world.join(ANNA)
    answer = PushAnswer(3, 0, 0)
    world.pushes.push(ANNA, 7, answer, OwnVersions())
    if how == "leaves":
        world.members.leave(ANNA)
    else:
        world.clock.now += 1000 * LEASE
    record = world.pushes.find(ANNA)
    assert (record.step, record.answer) == (7, answer)
    assert world.pushes.last("anna") == (ANNA.incarnation, 7)
    assert world.pushes.last("bert") is None


def test_another_model_makes_every_image_void(world):
    member = world.join(ANNA)
    before = member.downlink
    world.members.reset_downlinks()
    assert member.downlink is not before
    assert world.members.is_live(ANNA)


def test_workers_with_the_same_first_batches_are_counted_while_they_are_heard(world):
    members = world.members
    anna = world.join(ANNA)
    world.join(BERT)
    assert members.same_batches(anna, 7) == 0
    world.clock.now += 1
    assert members.same_batches(members.require(BERT), 7) == 0  # anna was heard before: she may be gone
    world.clock.now += 1
    assert members.same_batches(members.require(ANNA), 7) == 1
    world.clock.now += 1
    assert members.same_batches(members.require(BERT), 7) == 1
    assert members.same_batches(members.require(BERT), 8) == 0
    assert members.same_batches(members.require(ANNA), 0) == 0


def test_a_former_life_has_no_batches(world):
    world.members.same_batches(world.join(ANNA), 7)
    world.clock.now += 1
    bert = world.join(BERT)  # anna's next life, under another name, while her lease goes on
    for _ in range(3):
        assert world.members.same_batches(bert, 7) == 0
        world.clock.now += LEASE / 3
        world.members.require(BERT)
    world.clock.now += LEASE / 2
    world.members.require(BERT)
    again = world.join(ANNA_AGAIN)
    assert world.members.same_batches(again, 7) == 0
