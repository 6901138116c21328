"""Calls that wait for a condition are woken once it holds, and not before; nothing is kept of one that has gone."""

from pscore.wire.errors import ErrorCode
from psservice.awaiting import NotYetError, Waiters
from psservice.values import Identity


class Loop:
    """Takes what is posted to it, and runs that when told."""

    def __init__(self):
        self.posted = []

    def run(self):
        posted, self.posted = self.posted, []
        for look in posted:
            look()


def served():
    waiters, loop = Waiters(), Loop()
    waiters.serve_on(lambda look: loop.posted.append(look))
    return waiters, loop


def test_each_is_woken_once_when_its_own_condition_holds():
    waiters, loop = served()
    state, woken = {"version": 0}, []
    for version in (1, 2):
        waiters.add(lambda version=version: woken.append(version), lambda version=version: state["version"] >= version)
    waiters.wake()
    loop.run()
    assert woken == []
    for version in (1, 2):
        state["version"] = version
        waiters.wake()
        loop.run()
    waiters.wake()
    loop.run()
    assert woken == [1, 2]


def test_a_condition_that_holds_already_wakes_at_once():
    waiters, _ = served()
    woken = []
    waiters.add(lambda: woken.append(True), lambda: True)
    assert woken == [True]


def test_many_changes_before_the_loop_looks_are_one_look_and_a_later_one_is_another():
    waiters, loop = served()
    waiters.wake()
    assert not loop.posted, "nobody waits"
    waiters.add(lambda: None, lambda: False)
    for _ in range(5):
        waiters.wake()
    assert len(loop.posted) == 1
    loop.run()
    waiters.wake()
    assert len(loop.posted) == 1


def test_one_that_has_gone_is_not_woken_and_the_others_are():
    waiters, loop = served()
    woken = []

    def first():
        woken.append("first")

    waiters.add(first, lambda: False)
    waiters.add(lambda: woken.append("second"), lambda: True)
    waiters.add(lambda: woken.append("third"), lambda: "second" in woken)
    waiters.remove(first)
    waiters.remove(first)
    waiters.wake()
    loop.run()
    assert woken == ["second", "third"]


def test_everyone_is_woken_once_also_by_a_look_that_others_have_posted():
    waiters, loop = served()
    woken = []
    waiters.add(lambda: woken.append("first"), lambda: False)
    waiters.wake()
    waiters.wake(everyone=True)
    waiters.wake()
    loop.run()
    assert woken == ["first"]
    waiters.add(lambda: woken.append("second"), lambda: False)
    waiters.wake()
    loop.run()
    assert woken == ["first"]


def test_a_push_has_only_those_look_that_wait_for_its_worker_and_they_may_wait_for_another_then():
    waiters, loop = served()
    anna, bert = Identity("anna", "1"), Identity("bert", "1")
    clocks, woken, looked = {anna: 0, bert: 1}, [], []

    def is_over():
        looked.append("keyed")
        return min(clocks.values()) >= 2

    waiters.add(lambda: woken.append("keyed"), is_over, lambda: min(clocks, key=clocks.__getitem__))
    waiters.add(lambda: woken.append("other"), lambda: looked.append("other"))
    looked.clear()
    waiters.pushed(bert)
    assert looked == [], "nobody waits for bert"
    for identity in (anna, anna, bert):
        clocks[identity] += 1
        waiters.pushed(identity)
    assert woken == ["keyed"]
    assert set(looked) == {"keyed"}
    waiters.pushed(bert)
    assert (loop.posted, set(looked), len(waiters)) == ([], {"keyed"}, 1)


def test_a_call_whose_time_is_over_is_not_tried_at_once_for_ever():
    assert NotYetError(ErrorCode.ROUND_OPEN, "", lambda: False, again_seconds=0.0).again_seconds >= 0.01
