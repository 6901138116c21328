"""WAGMA-SGD through a shard: who is sent away, who is answered with what, and what a restart finds again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import ErrorCode, Rejected
from psservice.shard.join import leave
from psservice.shard.lifecycle import finish
from psservice.shard.push import check_push
from psservice.shard.rollback import roll_back
from psservice.state.run import RunState
from psservice.values import Identity
from psservice.wagma.schedule import StepTimes
from tests.psservice.durability.test_recovery import Shard, after_a_crash, send
from tests.psservice.service_makers import F32, bits, layout_of, segments_of, sparse_push
from tests.psservice.shard_makers import (
    ANNA,
    BERT,
    HOUR,
    Clock,
    full,
    join,
    open_shards,
    present,
    pull,
    push,
    reason_of,
    theta,
    upload,
    with_clock,
)
from tests.tiers import examples

LAYOUT = layout_of((6, F32), (4, F32))
CARL = Identity("carl", "1")


def agreed(size=2, tau=3, late="replace"):
    return {"update": "average", "group_size": str(size), "tau": str(tau), "late": late}


def values(seed=0):
    return torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(seed))


def dense(shard, seed):
    return [SparseSlice(shard.span, None, values(seed)[shard.span.start : shard.span.end])]


class Site:
    """Engines of a run, whose workers keep replicas as real ones do; what is not due never comes by itself."""

    def __init__(self, *shards, workers=(ANNA, BERT), **chosen):
        self.shards, self.clock = shards, Clock()
        self.replicas, self.links, self.steps = {}, {}, {}
        self.chosen = agreed(**chosen)
        for shard in shards:
            outcome = join(shard, LAYOUT, workers[0], "wagma", self.chosen)
            upload(shard, values(), workers[0], outcome.generation or full(1))
            shard.model.rounds._clock = self.clock
        for who in workers:
            self.enter(who)

    def enter(self, who):
        self.steps[who] = max(join(shard, LAYOUT, who, "wagma", self.chosen).first_step for shard in self.shards) - 1
        self.replicas[who] = torch.full((LAYOUT.size,), torch.nan)
        for shard in self.shards:
            self.links[who, shard] = (None, 0)
            self.pull(who, shard)

    def pull(self, who, shard=None):
        """Take a reply over, as a worker with exact replies does it; return how many entries it had."""
        shard = shard or self.shards[0]
        base, acknowledged = self.links[who, shard]
        reply = pull(shard, who, base=base, acknowledged=acknowledged)
        for segment in segments_of(reply, shard.span):
            where = slice(segment.span.start, segment.span.end)
            if segment.offsets is None:
                self.replicas[who][where] = segment.values
            else:
                self.replicas[who][where][segment.offsets] = segment.values
        self.links[who, shard] = (reply.version, reply.number)
        own = shard.model.replicas[who.worker_id].model.theta
        assert bits(self.replicas[who][shard.span.start : shard.span.end]) == bits(own)
        return round(reply.density * shard.span.length)

    def push(self, who, seed, shard=None, *, entries=None, step=None):
        """Push a dense change, or entries, as the next step."""
        shard = shard or self.shards[0]
        if shard is self.shards[0] and step is None:
            self.steps[who] += 1
        base, _ = self.links[who, shard]
        payload = dense(shard, seed) if entries is None else entries
        return push(shard, step or self.steps[who], payload, who, base=base or 0)


@pytest.fixture
def site():
    with open_shards() as (shard,):
        yield Site(shard)


def own(site, who):
    return site.shards[0].model.replicas[who.worker_id].model.theta


def steady(site, workers, steps):
    """Steps of one second in which workers come one after the other, so that a grace is known."""
    for step in range(steps):
        site.clock.now += 1.0
        for who in workers:
            site.clock.now += 0.2 * (1 + step % 2)
            site.push(who, step)
        for who in workers:
            site.pull(who)


def test_alone_a_worker_trains_its_own_model_which_is_the_model():
    with open_shards() as (shard,):
        site = Site(shard, workers=(ANNA,))
        expected = values()
        for step in range(1, 9):
            site.push(ANNA, step)
            expected -= values(step)
            site.pull(ANNA)
            assert bits(theta(shard)) == bits(expected) == bits(site.replicas[ANNA])
        assert shard.model.version == 8


def test_both_get_the_mean_when_both_are_there(site):
    steady(site, (ANNA, BERT), 8)
    assert bits(site.replicas[ANNA]) == bits(site.replicas[BERT])
    assert site.shards[0].model.version == 16


@pytest.mark.parametrize("late", ["replace", "paper"])
def test_the_sum_for_a_late_worker_counts_until_its_push(late):
    with open_shards() as (shard,):
        site = Site(shard, late=late)
        shard.memory.forget()
        before = shard.memory.total
        site.push(ANNA, 1)  # no time is known yet, so nobody is waited for
        site.pull(ANNA)
        shard.memory.forget()
        assert shard.memory.total == before + 4 * LAYOUT.size
        site.push(BERT, 2)
        assert shard.memory.total == before


def test_without_room_for_a_sum_a_round_waits_for_its_members_and_says_why():
    with open_shards(memory_bytes=4 * LAYOUT.size) as (shard,):
        site = Site(shard)
        site.push(ANNA, 1)
        with pytest.raises(Rejected, match="--memory-bytes") as refused:
            site.pull(ANNA)
        assert refused.value.reason is ErrorCode.ROUND_OPEN
        site.push(BERT, 2)
        for who in (ANNA, BERT):
            site.pull(who)
        assert bits(own(site, ANNA)) == bits(own(site, BERT))


def test_the_first_is_told_to_come_back_until_the_grace_is_over(site):
    steady(site, (ANNA, BERT), 8)
    site.clock.now += 1.0
    site.push(ANNA, 100)
    with pytest.raises(Rejected) as refused:
        site.pull(ANNA)
    assert refused.value.reason is ErrorCode.ROUND_OPEN
    assert 0.001 <= refused.value.again_seconds < 0.5
    assert not refused.value.is_over()
    site.clock.now += refused.value.again_seconds + 1e-6
    before = own(site, BERT).clone()
    site.pull(ANNA)
    assert bits(own(site, BERT)) == bits(before)
    site.push(BERT, 101)  # late: answered at once
    site.pull(BERT)


def test_in_a_global_round_only_the_end_of_a_lease_helps(site):
    shard = site.shards[0]
    leases = with_clock(shard)
    steady(site, (ANNA, BERT), 3)
    site.push(ANNA, 4)
    for _ in range(5):
        leases.now += HOUR / 5.5
        site.clock.now += HOUR
        assert reason_of(site.pull, ANNA) is ErrorCode.ROUND_OPEN
    leases.now += HOUR / 5.5
    assert not shard.leases.is_live(BERT)
    site.pull(ANNA)
    assert bits(theta(shard)) == bits(site.replicas[ANNA])


def test_while_its_round_is_open_a_worker_may_repeat_its_push_and_not_make_the_next(site):
    steady(site, (ANNA, BERT), 3)
    answer, _ = site.push(ANNA, 4)  # the fourth is global
    assert site.push(ANNA, 4, step=4) == (answer, True)
    shard = site.shards[0]
    assert reason_of(site.push, ANNA, 5, step=5) is ErrorCode.ROUND_OPEN
    assert reason_of(check_push, shard, ANNA, 5) is ErrorCode.ROUND_OPEN
    check_push(shard, ANNA, 4)
    assert shard.model.version == 7
    site.push(BERT, 4)
    check_push(shard, ANNA, 5)


def test_a_lost_lease_begins_anew_with_the_mean_although_the_version_is_the_same(site):
    """Nobody has pushed meanwhile, so the version that the worker names is a version of its new model too."""
    shard = site.shards[0]
    leases = with_clock(shard)
    steady(site, (ANNA, BERT), 1)
    site.push(ANNA, 50)
    site.clock.now += 10
    site.pull(ANNA)
    leases.now += 0.9 * HOUR
    site.pull(ANNA)
    leases.now += 0.2 * HOUR
    assert reason_of(site.pull, BERT) is ErrorCode.LEASE_EXPIRED
    site.pull(ANNA)
    base, _ = site.links[BERT, shard]
    join(shard, LAYOUT, BERT, "wagma", site.chosen)
    assert site.pull(BERT) == LAYOUT.size
    assert bits(site.replicas[BERT]) == bits(site.replicas[ANNA])
    assert base <= shard.model.version
    assert site.pull(BERT) == 0


def test_a_reply_that_was_lost_is_whole_again(site):
    shard = site.shards[0]
    join(shard, LAYOUT, CARL, "wagma", site.chosen)
    for _ in range(3):  # none of these arrives
        assert pull(shard, CARL, base=shard.model.version).density == 1


def test_another_life_of_a_worker_has_another_model(site):
    shard = site.shards[0]
    steady(site, (ANNA, BERT), 1)
    site.push(BERT, 77)
    site.clock.now += 10
    site.pull(BERT)
    leave(shard, BERT)
    again = Identity("bert", "2")
    site.enter(again)
    assert bits(site.replicas[again]) == bits(own(site, ANNA))
    assert site.steps[again] == 2


def test_a_newcomer_is_given_the_number_of_the_next_iteration(site):
    steady(site, (ANNA, BERT), 5)
    site.enter(CARL)
    assert site.steps[CARL] == 5
    torch.testing.assert_close(site.replicas[CARL], theta(site.shards[0]))
    steady(site, (ANNA, BERT, CARL), 3)
    assert bits(site.replicas[CARL]) == bits(site.replicas[ANNA])  # the eighth was global


def test_sparse_changes_are_answered_sparsely(site):
    steady(site, (ANNA, BERT), 4)
    site.push(ANNA, 0, entries={1: 1.0})
    site.push(BERT, 0, entries={8: 1.0})
    assert site.pull(ANNA) == site.pull(BERT) == 2


def test_the_end_gives_everybody_the_model(site):
    shard = site.shards[0]
    steady(site, (ANNA, BERT), 3)
    site.push(ANNA, 9)  # waits for all
    finish(shard)
    assert shard.run.state is RunState.FINISHED
    for who in (ANNA, BERT):
        site.pull(who)
        assert bits(site.replicas[who]) == bits(theta(shard))


def test_a_push_that_is_refused_changes_nothing_and_its_step_stays_free():
    with open_shards() as (shard,):
        site = Site(shard, workers=(ANNA,))
        site.push(ANNA, 0, entries={0: -3.4e38})
        site.pull(ANNA)
        before = bits(own(site, ANNA))
        assert reason_of(site.push, ANNA, 0, entries={0: -3.4e38, 1: 1.0}, step=2) is ErrorCode.NON_FINITE
        assert (bits(own(site, ANNA)), shard.model.version) == (before, 1)
        assert site.push(ANNA, 0, entries={1: 1.0})[0].version == 2
        assert site.pull(ANNA) == 1


@pytest.mark.parametrize("num_shards", [2, 3])
def test_shards_decide_by_themselves_and_alike_where_all_are_on_time(num_shards):
    with open_shards() as (whole,), open_shards(num_shards) as parts:
        sites = Site(whole), Site(*reversed(list(reversed(parts))))
        for step in range(9):
            for site in sites:
                site.clock.now += 1.0
                for who in (ANNA, BERT):
                    for shard in site.shards:
                        site.push(who, step + len(who.worker_id + who.worker_id[:1]) * step, shard)
                for who in (ANNA, BERT):
                    for shard in site.shards:
                        site.pull(who, shard)
        for who in (ANNA, BERT):
            assert bits(sites[0].replicas[who]) == bits(sites[1].replicas[who])


def test_where_shards_freeze_different_sets_each_averages_over_its_own():
    with open_shards(2) as shards:
        site = Site(*shards)
        first, second = shards
        site.push(ANNA, 1, first)
        site.push(ANNA, 1, second)
        site.pull(ANNA, first)  # no grace is known yet: frozen here without Bert
        site.clock.now += 1.0
        site.push(BERT, 2, first)
        site.push(BERT, 2, second)
        for shard in shards:
            for who in (ANNA, BERT):
                site.pull(who, shard)
        mean = values() - (values(1) + values(2)) / 2
        torch.testing.assert_close(site.replicas[BERT], mean)


# After a crash

scripts = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["push", "push", "sparse", "huge"]), st.sampled_from([ANNA, BERT, CARL])),
        st.tuples(st.sampled_from(["pull", "join", "leave"]), st.sampled_from([ANNA, BERT, CARL])),
        st.tuples(st.sampled_from(["time", "snapshot", "finish"]), st.just(ANNA)),
    ),
    max_size=40,
)


def act(shard, clock, steps, number, action, who):
    """One act on a shard; what is refused changes nothing."""
    try:
        if action == "time":
            clock.now += 10.0
        elif action == "snapshot":
            shard.durability.take()
        elif action == "finish" and number % 4 == 0:
            finish(shard)
        elif action == "join":
            steps[who] = max(steps.get(who, 1), join(shard, LAYOUT, who, "wagma", agreed(late="paper")).first_step)
        elif action == "leave":
            leave(shard, who)
        elif action == "pull":
            pull(shard, who)
        elif action in ("push", "sparse", "huge"):
            segment = {
                "push": lambda: SparseSlice(shard.span, None, values(number)),
                "sparse": lambda: sparse_push(shard.span, 0.3, number),
                "huge": lambda: SparseSlice(
                    shard.span, torch.tensor([3]), torch.tensor([-3e38])
                ),  # the next is refused
            }[action]()
            send(shard, steps.get(who, 1), segment, who, base=shard.model.version)
            steps[who] = steps.get(who, 1) + 1
    except Rejected:
        pass


def assert_same_models(again, shard):
    assert bits(again.model.current()) == bits(shard.model.current())
    mine, theirs = again.model.export(), shard.model.export()
    assert mine.plain["rounds"] == theirs.plain["rounds"]
    assert {n: bits(t) for n, t in mine.tensors.items()} == {n: bits(t) for n, t in theirs.tensors.items()}
    assert [found["version"] for found in mine.plain["workers"]] == [f["version"] for f in theirs.plain["workers"]]
    assert again.model.version == shard.model.version


@pytest.mark.long
@given(script=scripts)
@settings(deadline=None, max_examples=examples(40))
def test_whatever_happened_a_restart_finds_every_model_and_every_open_round(script, tmp_path_factory):
    directory = tmp_path_factory.mktemp("data") / "live"
    with Shard(directory) as shard:
        outcome = join(shard, LAYOUT, ANNA, "wagma", agreed(late="paper"))
        upload(shard, values(), ANNA, outcome.generation)
        clock, steps = Clock(), {}
        shard.model.rounds._clock = clock
        join(shard, LAYOUT, BERT, "wagma", agreed(late="paper"))
        for number, (action, who) in enumerate(script):
            act(shard, clock, steps, number, action, who)
        with Shard(after_a_crash(directory)) as again:
            assert_same_models(again, shard)
            assert present(again) == present(shard)
            for one in (shard, again):
                ahead = dict(steps)
                one.model.rounds._clock, one.model.rounds._times, one.model.rounds._began = Clock(), StepTimes(), {}
                for number, who in enumerate((ANNA, BERT, ANNA)):
                    act(one, clock, ahead, number, "push", who)
                    act(one, clock, ahead, number, "pull", who)
            assert_same_models(again, shard)


def test_a_rollback_brings_back_every_model(tmp_path):
    with Shard(tmp_path / "live") as shard:
        site = Site(shard)
        for step in range(1, 7):
            for who in (ANNA, BERT):
                send(shard, step, SparseSlice(shard.span, None, values(step)), who, base=0)
            if step == 3:
                before = bits(theta(shard))
        roll_back(shard, 6, "")
        assert bits(theta(shard)) == before
        site.links = dict.fromkeys(site.links, (None, 0))
        for who in (ANNA, BERT):
            site.pull(who)


def kept(site, who, seed):
    """Push a dense change as the next step, which the journal has."""
    (shard,) = site.shards
    site.steps[who] += 1
    base, _ = site.links[who, shard]
    send(shard, site.steps[who], SparseSlice(shard.span, None, values(seed)), who, base=base or 0)


def three_steps(site):
    """Up to the first global iteration of tau=3; the journal has them."""
    for step in range(3):
        for who in (ANNA, BERT):
            kept(site, who, step)
        for who in (ANNA, BERT):
            site.pull(who)


def test_nobody_waits_for_one_whose_push_was_dropped_by_going_back(tmp_path):
    """Bert's part reached this shard before it went back and another one after: he waits there, and not here."""
    with Shard(tmp_path / "live") as shard:
        site = Site(shard)
        three_steps(site)
        at = shard.model.version
        kept(site, BERT, 3)  # the global iteration: it waits for Anna
        assert reason_of(site.pull, BERT) is ErrorCode.ROUND_OPEN
        roll_back(shard, at, "")
        site.links = dict.fromkeys(site.links, (None, 0))
        kept(site, ANNA, 3)
        for who in (ANNA, BERT):
            site.pull(who)
        for step in range(4, 8):
            for who in (BERT, ANNA):
                kept(site, who, step)
                if step == 7 and who is BERT:  # the next global one: they wait for one another again
                    assert reason_of(site.pull, BERT) is ErrorCode.ROUND_OPEN
            for who in (ANNA, BERT):
                site.pull(who)
        assert bits(site.replicas[ANNA]) == bits(site.replicas[BERT])


def test_a_round_that_was_open_then_is_not_open_after_going_back(tmp_path):
    with Shard(tmp_path / "live") as shard:
        site = Site(shard)
        three_steps(site)
        kept(site, BERT, 3)
        at = shard.model.version
        kept(site, ANNA, 3)
        for who in (ANNA, BERT):
            site.pull(who)
        roll_back(shard, at, "")
        site.links = dict.fromkeys(site.links, (None, 0))
        for who in (BERT, ANNA):
            site.pull(who)
            kept(site, who, 4)
