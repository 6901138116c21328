"""When rounds freeze: nobody waits for a slow member beyond its grace, but at a global one; deaths free who waits."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from psservice.model.training_mode import GroupSettings
from psservice.wagma.group_rounds import Frozen, GroupRounds
from tests.psservice.shard_makers import Clock
from tests.tiers import examples

PAIRS = GroupSettings(size=2, tau=3)
ALL = ("a", "b", "c", "d")


def rounds_of(*workers, settings_=PAIRS):
    clock = Clock()
    rounds = GroupRounds(settings_, clock)
    for worker in workers:
        rounds.enter(worker)
    return rounds, clock


def freeze_all(rounds):
    found = []
    while (frozen := rounds.due()) is not None:
        rounds.freeze(frozen.iteration, frozen.fresh[0])
        found.append(frozen)
    return found


def steady(rounds, clock, workers, iterations, *, spread=0.2):
    """Run some iterations in which workers come one after the other, so that times are known."""
    for iteration in iterations:
        clock.now += 1.0
        for worker in workers:
            clock.now += spread * (1 + iteration % 2)
            rounds.arrive(worker, iteration)
            freeze_all(rounds)


def test_a_group_freezes_as_soon_as_all_have_come():
    rounds, clock = rounds_of(*ALL)
    steady(rounds, clock, ALL, range(12))
    clock.now += 1.0
    assert rounds.arrive("a", 12)
    assert freeze_all(rounds) == []
    assert rounds.arrive("c", 12)
    assert freeze_all(rounds) == []
    assert rounds.arrive("b", 12)
    assert freeze_all(rounds) == [Frozen(12, ("a", "b"), (), ())]
    assert rounds.waits("a") is None
    assert rounds.waits("c").fresh == {"c"}


def test_the_first_waits_for_its_grace_and_no_longer():
    rounds, clock = rounds_of("a", "b")
    steady(rounds, clock, ("a", "b"), range(12))
    clock.now += 1.0
    assert rounds.arrive("a", 12)
    assert rounds.due() is None
    waiting = rounds.waits("a")
    grace = rounds.seconds_left(waiting)
    assert 0.01 < grace < 0.5  # of steps of about a second
    clock.now += 0.9 * grace
    assert rounds.due() is None
    clock.now += rounds.seconds_left(waiting) + 1e-6
    assert freeze_all(rounds) == [Frozen(12, ("a",), ("b",), ())]
    assert not rounds.arrive("b", 12)  # late: it need not wait


def test_who_is_an_iteration_behind_is_not_even_given_the_grace():
    rounds, clock = rounds_of("a", "b")
    steady(rounds, clock, ("a", "b"), range(12))
    rounds.arrive("a", 12)
    clock.now += 1.0
    assert freeze_all(rounds) == [Frozen(12, ("a",), ("b",), ())]
    rounds.arrive("a", 13)
    assert freeze_all(rounds) == [Frozen(13, ("a",), ("b",), ())]
    rounds.arrive("a", 15)  # but in a global round it is waited for
    assert freeze_all(rounds) == []


def test_a_global_round_waits_for_all_that_live_however_long():
    rounds, clock = rounds_of(*ALL)
    for worker in ALL[:3]:
        rounds.arrive(worker, 3)
    clock.now += 1e6
    assert rounds.due() is None
    assert rounds.seconds_left(rounds.waits("a")) == math.inf
    rounds.arrive("d", 3)
    assert freeze_all(rounds) == [Frozen(3, ALL, (), ())]


def test_a_death_frees_those_who_wait_in_a_global_round():
    rounds, _ = rounds_of(*ALL)
    for worker in ALL[:3]:
        rounds.arrive(worker, 3)
    rounds.leave("d")
    assert freeze_all(rounds) == [Frozen(3, ("a", "b", "c"), (), ())]


def test_the_dead_are_not_averaged_even_if_they_had_come():
    rounds, _ = rounds_of(*ALL)
    for worker in ALL[1:]:
        rounds.arrive(worker, 3)
    rounds.leave("d")
    rounds.arrive("a", 3)
    assert freeze_all(rounds) == [Frozen(3, ("a", "b", "c"), (), ())]


def test_who_enters_while_a_global_round_is_open_belongs_to_the_next_and_is_not_waited_for():
    rounds, _ = rounds_of("a", "b")
    rounds.arrive("a", 3)
    rounds.enter("c")
    rounds.arrive("b", 3)
    assert freeze_all(rounds) == [Frozen(3, ("a", "b"), (), ())]
    for worker in ("a", "b"):
        rounds.arrive(worker, 7)
    assert rounds.due() is None
    assert rounds.arrive("c", 7)
    assert freeze_all(rounds) == [Frozen(7, ("a", "b", "c"), (), ())]


def test_a_model_that_is_too_old_is_left_out():
    rounds, clock = rounds_of("a", "b", settings_=GroupSettings(size=2, tau=2))
    for iteration in (0, 1):  # a round each in which b is not; the one at 2 is global and would wait
        rounds.arrive("a", iteration)
        assert freeze_all(rounds) == [Frozen(iteration, ("a",), ("b",), ())]
    rounds.arrive("a", 3)
    assert freeze_all(rounds) == [Frozen(3, ("a",), (), ("b",))]
    clock.now += 1
    assert not rounds.arrive("b", 3)


def test_who_skips_an_iteration_is_not_waited_for():
    rounds, _ = rounds_of("a", "b")
    rounds.arrive("a", 3)
    rounds.arrive("b", 4)
    assert Frozen(3, ("a",), (), ()) in freeze_all(rounds)


histories = st.lists(
    st.tuples(st.sampled_from(["push", "push", "push", "enter", "leave", "time"]), st.sampled_from("abcdef")),
    max_size=120,
)


@given(histories, st.sampled_from([0, 2, 3]), st.integers(0, 4))
@settings(deadline=None, max_examples=examples(150))
def test_whatever_comes_and_goes_nobody_waits_for_ever_and_a_copy_goes_on_alike(history, size, tau):
    rounds, clock = rounds_of("a", settings_=GroupSettings(size=size, tau=tau))
    steps = {"a": 0}
    entered = 0
    for action, worker in history:
        if action == "time":
            clock.now += 1.0
        elif action == "enter" and worker not in steps:
            rounds.enter(worker)
            steps[worker] = rounds.newest + 1
            entered += 1
        elif action == "leave" and worker in steps:
            rounds.leave(worker)
            del steps[worker]
        elif action == "push" and worker in steps and rounds.waits(worker) is None:
            rounds.arrive(worker, steps[worker])
            steps[worker] += 1
        freeze_all(rounds)
    again = GroupRounds(GroupSettings(size=size, tau=tau), clock)
    again.restore(rounds.export())
    assert again.export() == rounds.export()
    # Nobody gets ahead of the slowest by more than a period: the global round in between has stopped it. Who enters
    # begins behind the newest round, so each can be a period further ahead than who was there before.
    if steps:
        assert max(steps.values()) - min(steps.values()) <= (2 + entered) * (tau + 1)
    # Let everyone who does not wait push until all have met in global rounds.
    for copy in (rounds, again):
        mine = dict(steps)
        for _ in range(4 * (tau + 1)):
            clock.now += 100.0
            freeze_all(copy)
            for worker in sorted(mine):
                if copy.waits(worker) is None:
                    copy.arrive(worker, mine[worker])
                    mine[worker] += 1
            freeze_all(copy)
        assert not mine or min(mine.values()) > max(steps.values())
