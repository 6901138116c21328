"""Jobs of other threads: who is interrupted waits for none of them, and a part ends as its whole does."""

import signal
import threading

import pytest

from psclient import executor
from psclient.executor import SerialExecutor

SECONDS = 30.0


@pytest.fixture
def threads():
    made = [SerialExecutor("whole"), SerialExecutor("part")]
    yield made
    for each in made:
        each.close(SECONDS)


def test_a_part_of_a_cancelled_job_is_begun_knows_of_it_and_gives_its_own_answer(threads):
    whole, part = threads
    begun, cancelled = threading.Event(), threading.Event()

    def work():
        begun.set()
        assert cancelled.wait(SECONDS)
        return part.submit(executor.is_cancelled, as_part=True).result(SECONDS)

    job = whole.submit(work)
    assert begun.wait(SECONDS)
    whole.cancel()
    cancelled.set()
    assert job.result(SECONDS) is True


def test_a_job_that_nobody_waits_for_any_more_is_not_begun(threads):
    whole, _ = threads
    begun, go_on, cut = threading.Event(), threading.Event(), threading.Event()
    whole.submit(lambda: (begun.set(), go_on.wait(SECONDS)))
    assert begun.wait(SECONDS)
    done = []
    with pytest.raises(TimeoutError):
        whole.call(lambda: done.append(True), lambda: (cut.set(), go_on.set()), seconds=0.0)
    assert cut.is_set()
    assert whole.submit(lambda: None).wait(SECONDS)
    assert not done


def test_a_signal_that_interrupts_no_system_call_is_heard_while_a_job_is_waited_for(threads):
    whole, _ = threads
    heard, go_on = [], threading.Event()
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: (heard.append(number), go_on.set()))
    try:

        def work():
            # To this thread, not to the one that waits: as where it comes just before that begins to wait.
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
            return go_on.wait(SECONDS)

        assert whole.submit(work).result(SECONDS) is True
        go_on.clear()
        assert whole.call(work, lambda: None) is True
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert heard
