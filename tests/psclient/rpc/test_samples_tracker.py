"""What was drawn, trained and acknowledged: nothing is finished before its push, and nothing is forgotten."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from psclient.rpc.samples import SampleTracker
from pscore.model.ranges import Ranges
from tests.tiers import examples


def places(share):
    return {(epoch, i) for epoch, ranges in share.items() for start, end in ranges for i in range(start, end)}


def said(messages):
    return {(r.epoch, i) for each in messages for r in each.ranges for i in range(r.start, r.start + r.count)}


class Worker(RuleBasedStateMachine):
    """A loader that draws ahead, steps, pushes that are lost or refused, and loops that are left."""

    def __init__(self):
        super().__init__()
        self.tracker = SampleTracker()
        self.next, self.epoch = 0, 0
        self.again = []
        self.drawn, self.trained, self.finished, self.pushed = [], set(), set(), set()

    @rule(count=st.integers(1, 9))
    def draws(self, count):
        for _ in range(count):
            if self.again:
                place = self.again.pop(0)
            else:
                place, self.next = (self.epoch, self.next), self.next + 1
            self.tracker.draw("train", *place)
            self.drawn.append(place)

    @rule()
    def begins_an_epoch(self):
        self.epoch, self.next = self.epoch + 1, 0

    @rule(samples=st.integers(0, 9), applied=st.booleans())
    def steps(self, samples, applied):
        done, self.drawn = self.drawn[:samples], self.drawn[samples:]
        self.trained |= set(done)
        assert said(self.tracker.open_push(samples)) == self.trained
        if applied:
            self.tracker.acknowledged()
            self.finished |= self.trained
            self.trained = set()

    @rule(keep=st.integers(0, 5))
    def leaves_the_loop(self, keep):
        back = [
            (piece.epoch, i)
            for piece in self.tracker.undraw("train", keep)
            for i in range(piece.start, piece.start + piece.count)
        ]
        assert back == self.drawn[keep:]
        self.again = back + self.again
        del self.drawn[keep:]

    @invariant()
    def holds_what_is_not_finished(self):
        assert places(self.tracker.unacked("train")) == set(self.drawn) | self.trained


TestWorker = Worker.TestCase
TestWorker.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


def test_datasets_are_told_apart():
    tracker = SampleTracker()
    for place in range(3):
        tracker.draw("a", 0, place)
        tracker.draw("b", 0, place)
    assert [(each.dataset, said([each])) for each in tracker.open_push(3)] == [
        ("a", {(0, 0), (0, 1)}),
        ("b", {(0, 0)}),
    ]
    assert [piece.start for piece in tracker.undraw("b", 1)] == [2]
    assert tracker.unacked("b") == {0: Ranges([(0, 2)])}
    assert tracker.unacked("a") == {0: Ranges([(0, 3)])}


def test_a_push_carries_no_more_ranges_than_a_message_may_hold():
    tracker = SampleTracker()
    for place in range(0, 12000, 2):
        tracker.draw("train", 0, place)
    first = tracker.open_push(6000)
    assert len(first[0].ranges) == 4096
    tracker.acknowledged()
    assert len(tracker.open_push(0)[0].ranges) == 6000 - 4096
