"""Samples that are handed out: each is finished exactly once an epoch, whoever comes, dies, repeats or lies."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pscore.model.ranges import Ranges
from pscore.wire.errors import ErrorCode, Rejected
from psservice.data_leases.codec import from_plain, share_of, share_to_messages, to_plain
from psservice.data_leases.dataset import MOST_DATASETS, MOST_RANGES, Dataset, Datasets, Epoch, Plan, SampleRequest
from psservice.values import Identity
from tests.tiers import examples

ANNA, BERT, CARL = (Identity(name, "1") for name in ("anna", "bert", "carl"))
EMPTY = Dataset(Plan(1, 0, False), 0, {})


def plan(size=20):
    return Plan(size, seed=3, shuffle=True)


def wish(epoch=0, samples=4, held=None, size=20, name="train"):
    return SampleRequest(name, plan(size), epoch, samples, held or {})


def ask(datasets, who, wanted, live=None):
    """Lease, and let it be so."""
    leased = datasets.lease(who, wanted, live or {ANNA, BERT, CARL})
    datasets.update({wanted.dataset: leased.after})
    return leased


def finish(datasets, who, share, name="train"):
    datasets.update(datasets.finish(who, {name: share}))


def places(share):
    return [
        (epoch, place)
        for epoch, ranges in sorted(share.items())
        for start, end in ranges
        for place in range(start, end)
    ]


def share(*found):
    pairs = {}
    for epoch, place in found:
        pairs.setdefault(epoch, []).append((place, place + 1))
    return {epoch: Ranges(each) for epoch, each in pairs.items()}


class Workers(RuleBasedStateMachine):
    """Three workers that lease, train in any order, lose answers, die, come back from the dead, and claim too much."""

    def __init__(self):
        super().__init__()
        self.size = 23
        self.datasets, self.twin = Datasets(), Datasets()  # the twin does only what would be in the journal
        self.live = {ANNA: 1, BERT: 1, CARL: 1}
        self.knows = {who: set() for who in self.live}  # what each believes it holds
        self.finished = Counter()
        self.lease(ANNA, 0, 0, set())

    def identity(self, who):
        return Identity(who.worker_id, str(self.live[who]))

    def lease(self, who, goal, samples, claimed, heard=True):
        live = {self.identity(each) for each in self.live if self.live[each] > 0}
        wanted = SampleRequest("train", plan(self.size), goal, samples, share(*claimed))
        leased = self.datasets.lease(self.identity(who), wanted, live)
        if leased.changed:
            self.twin.apply(self.identity(who), wanted, leased.granted, leased.gone)
            self.datasets.update({"train": leased.after})
        for place in places(leased.granted):
            assert not self.finished[place], "handed out after it was finished"
            holders = [each for each in self.live if self.live[each] > 0 and each != who and place in self.held(each)]
            assert not holders, "handed to two"
        if heard:
            self.knows[who] = (set(claimed) - set(places(leased.lost))) | set(places(leased.granted))
        return leased

    def held(self, who):
        return set(places(self.datasets.get("train", EMPTY).held_by(self.identity(who))))

    workers = st.sampled_from([ANNA, BERT, CARL])

    @precondition(lambda self: any(number > 0 for number in self.live.values()))
    @rule(who=workers, ahead=st.integers(0, 2), samples=st.integers(0, 9), heard=st.booleans())
    def asks(self, who, ahead, samples, heard):
        if self.live[who] > 0:
            newest = self.datasets["train"].newest
            self.lease(who, max(0, newest - 1 + ahead), samples, self.knows[who], heard)

    @rule(who=workers, data=st.data())
    def trains(self, who, data):
        if self.live[who] > 0 and self.knows[who]:
            done = data.draw(st.sets(st.sampled_from(sorted(self.knows[who])), max_size=9))
            before = self.held(who) | set(self.left_by(who))
            for each in (self.datasets, self.twin):
                finish(each, self.identity(who), share(*done))
            self.finished.update(done & before)
            self.knows[who] -= done

    def left_by(self, who):
        known = self.datasets["train"]
        return {
            (number, place)
            for number, epoch in known.epochs.items()
            for start, end in epoch.returned.get(self.identity(who), Ranges())
            for place in range(start, end)
        }

    @rule(who=workers)
    def dies(self, who):
        if self.live[who] > 0:
            self.live[who] = -self.live[who] - 1
            self.knows[who] = set()

    @rule(who=workers)
    def begins_anew(self, who):
        self.live[who] = abs(self.live[who])

    @rule(who=workers)
    def was_only_silent_for_too_long(self, who):
        """Others ask meanwhile, so that what it holds goes back; it still believes that it holds it."""
        if self.live[who] > 0:
            number, self.live[who] = self.live[who], -1
            for other in self.live:
                if self.live[other] > 0:
                    self.lease(other, 0, 2, self.knows[other])
            self.live[who] = number

    @rule()
    def server_starts_again(self):
        self.datasets = from_plain(json.loads(json.dumps(to_plain(self.datasets))))

    @invariant()
    def each_place_is_in_one_state(self):
        assert self.datasets == self.twin, "the journal tells another story"
        assert max(self.finished.values(), default=1) == 1
        for known in self.datasets.values():
            for number, epoch in known.epochs.items():
                seen = Counter(range(epoch.fresh, self.size))
                for ranges in (*epoch.held.values(), *epoch.returned.values()):
                    seen.update(i for start, end in ranges for i in range(start, end))
                seen.update(place for (which, place), _ in self.finished.items() if which == number)
                assert seen == Counter(range(self.size))

    def teardown(self):
        """One worker that goes on alone finishes everything: nothing is lost, nobody starves."""
        last = Identity("last", "1")
        newest = self.datasets["train"].newest
        for _ in range(1000):
            answer = ask(self.datasets, last, SampleRequest("train", plan(self.size), newest, 5, {}), {last})
            if not answer.granted:
                break
            self.finished.update(places(answer.granted))
            finish(self.datasets, last, answer.granted)
        assert answer.held_by_others == 0
        expected = [(number, place) for number in range(newest + 1) for place in range(self.size)]
        assert self.finished == Counter(expected)


TestWorkers = pytest.mark.long(Workers.TestCase)
TestWorkers.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


def test_a_repeated_call_gets_the_same_share_and_no_other():
    datasets = Datasets()
    first = ask(datasets, ANNA, wish())
    assert ask(datasets, ANNA, wish()) == replace(first, changed=False)
    assert places(ask(datasets, ANNA, wish(held=first.granted)).granted)[0] == (0, 4)


def test_what_a_dead_worker_has_not_finished_goes_to_others_first():
    datasets = Datasets()
    ask(datasets, ANNA, wish())
    finish(datasets, ANNA, {0: Ranges([(0, 1)])})
    assert places(ask(datasets, BERT, wish(), {BERT}).granted) == [(0, 1), (0, 2), (0, 3), (0, 4)]


def test_who_was_taken_for_dead_keeps_what_nobody_has_taken():
    datasets = Datasets()
    mine = ask(datasets, ANNA, wish()).granted
    theirs = ask(datasets, BERT, wish(samples=2), {BERT}).granted
    answer = ask(datasets, ANNA, wish(held=mine, samples=0))
    assert (answer.granted, answer.lost) == ({}, theirs)
    assert datasets["train"].held_by(ANNA) == {0: mine[0] - theirs[0]}


def test_an_epoch_begins_when_nothing_of_those_before_it_is_left():
    datasets = Datasets()
    assert set(ask(datasets, ANNA, wish(epoch=0, samples=100), {ANNA}).granted) == {0}
    while ask(datasets, BERT, wish(epoch=0, samples=100)).granted:
        finish(datasets, BERT, datasets["train"].held_by(BERT))
    drained = ask(datasets, BERT, wish(epoch=0))
    assert drained.held_by_others == 10
    assert drained.after.newest == 0
    assert set(ask(datasets, BERT, wish(epoch=1)).granted) == {1}
    assert set(ask(datasets, CARL, wish(epoch=1), {BERT, CARL}).granted) == {0}  # Anna is dead: hers come first


def test_shares_shrink_towards_the_end():
    datasets = Datasets()
    sizes = []
    held = {}
    while granted := ask(datasets, ANNA, wish(samples=16, size=100, held=held)).granted:
        sizes.append(len(places(granted)))
        held = {0: held.get(0, Ranges()) | granted[0]}
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1], sum(sizes)) == (16, 1, 100)


def test_who_joins_late_begins_at_the_newest_epoch():
    datasets = Datasets()
    ask(datasets, ANNA, wish(epoch=7))
    assert set(ask(datasets, BERT, wish(epoch=None)).granted) == {7}


@pytest.mark.parametrize("other", [Plan(21, 3, True), Plan(20, 4, True), Plan(20, 3, False)])
def test_workers_must_agree(other):
    datasets = Datasets()
    ask(datasets, ANNA, wish())
    with pytest.raises(Rejected) as refused:
        datasets.lease(BERT, SampleRequest("train", other, 0, 4, {}), {ANNA, BERT})
    assert refused.value.reason is ErrorCode.SETTINGS_MISMATCH


def test_what_a_worker_does_not_hold_it_can_neither_finish_nor_claim():
    datasets = Datasets()
    mine = ask(datasets, ANNA, wish()).granted
    before = dict(datasets)
    finish(datasets, BERT, {0: Ranges([(0, 20)]), 9: Ranges([(0, 1)])})
    assert datasets == before
    answer = ask(datasets, BERT, wish(held={0: Ranges([(0, 20)]), 5: Ranges([(0, 1)])}, samples=0))
    assert answer.lost == {0: Ranges([(0, 20)]), 5: Ranges([(0, 1)])}
    assert datasets["train"].held_by(ANNA) == mine


@pytest.mark.long
def test_nobody_fills_the_memory():
    datasets = Datasets()
    for number in range(MOST_DATASETS):
        ask(datasets, ANNA, wish(name=f"d{number}"))
    with pytest.raises(Rejected, match="at most"):
        ask(datasets, ANNA, wish(name="one more"))
    tiny = {"train": Dataset(plan(1), 0, {0: Epoch()})}
    datasets = Datasets(tiny)
    held = {}
    for epoch in range(1000):
        granted = ask(datasets, ANNA, wish(epoch=epoch, size=1, held=held)).granted
        held |= granted
    assert len(datasets["train"].epochs) == len(held) == 64
    size = 10 * MOST_RANGES
    datasets = Datasets()
    ask(datasets, ANNA, wish(size=size, samples=size), {ANNA})
    every_second = {0: Ranges((i, i + 1) for i in range(1, size, 2))}
    with pytest.raises(Rejected, match="pieces"):
        finish(datasets, ANNA, every_second)


def test_shares_are_the_same_as_messages():
    found = {0: Ranges([(0, 3), (5, 6)]), 2: Ranges([(1, 2)])}
    assert share_of(share_to_messages(found), 6) == found
