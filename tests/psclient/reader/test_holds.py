"""Many hold a model together, and one changes it alone."""

import threading

import pytest

from psclient.reader.holds import Holds
from tests.system.tools import wait_until


def start(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_nobody_holds_while_one_is_alone_and_later_holders_come_after_it():
    holds, log, inside, may_leave = Holds(), [], threading.Event(), threading.Event()

    def hold():
        with holds.together():
            inside.set()
            may_leave.wait(30)
            log.append("held")

    def change():
        with holds.alone():
            log.append("alone")

    first = start(hold)
    assert inside.wait(30)
    writer = start(change)
    wait_until(lambda: holds._waiting_alone == 1)

    def hold_later():
        with holds.together():
            log.append("later")

    later = start(hold_later)
    assert log == []
    may_leave.set()
    for thread in (first, writer, later):
        thread.join(30)
    assert log == ["held", "alone", "later"]


def test_a_thread_holds_twice_although_another_waits_to_be_alone():
    holds, log = Holds(), []

    def change():
        with holds.alone():
            log.append("alone")

    with holds.together():
        writer = start(change)
        wait_until(lambda: holds._waiting_alone == 1)
        with holds.together():
            log.append("inner")
        assert log == ["inner"]
    writer.join(30)
    assert log == ["inner", "alone"]


def test_a_thread_may_give_back_in_any_order():
    """As two tasks of an event loop do."""
    holds, log = Holds(), []
    first, second = holds.together(), holds.together()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)

    def change():
        with holds.alone():
            log.append("alone")

    writer = start(change)
    wait_until(lambda: holds._waiting_alone == 1)
    assert log == []
    assert holds.is_mine
    second.__exit__(None, None, None)
    writer.join(30)
    assert log == ["alone"]
    assert not holds.is_mine


def test_waiting_to_hold_has_an_end():
    holds, inside, may_leave = Holds(), threading.Event(), threading.Event()

    def change():
        with holds.alone():
            inside.set()
            may_leave.wait(30)

    writer = start(change)
    assert inside.wait(30)
    with pytest.raises(TimeoutError), holds.together(0.05):
        pass
    may_leave.set()
    writer.join(30)
    with holds.together(0.05):
        pass


def test_an_error_inside_leaves_it_free():
    holds = Holds()
    for context in (holds.together, holds.alone):
        try:
            with context():
                raise ValueError
        except ValueError:
            pass
    with holds.alone():
        pass
    with holds.together():
        pass
