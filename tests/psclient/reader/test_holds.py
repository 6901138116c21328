"""Many hold a model together, and one changes it alone."""

import threading

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
