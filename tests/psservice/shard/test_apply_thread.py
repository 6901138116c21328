"""The writer: one thread, in order, behind a bounded queue."""

import threading

import pytest

from pscore.wire.errors import ErrorCode, Rejected
from psservice.apply_thread import ApplyThread


def in_thread(job):
    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    return thread


def test_jobs_run_one_at_a_time_on_one_thread_which_is_not_the_caller():
    writer, seen = ApplyThread(64), []
    callers = [in_thread(lambda: writer.run(lambda: seen.append(threading.get_ident()))) for _ in range(8)]
    for caller in callers:
        caller.join()
    writer.close()
    assert len(seen) == 8
    assert len(set(seen)) == 1
    assert threading.get_ident() not in seen


def test_a_job_returns_its_result_or_raises_its_error():
    writer = ApplyThread(4)
    assert writer.run(lambda: 42) == 42
    with pytest.raises(ZeroDivisionError):
        writer.run(lambda: 1 / 0)
    assert writer.run(lambda: "goes on") == "goes on"
    writer.close()


def blocked(writer):
    """Occupy the writer until the returned event is set."""
    running, release = threading.Event(), threading.Event()

    def job():
        running.set()
        release.wait()

    in_thread(lambda: writer.run(job))
    running.wait()
    return release


def test_a_full_queue_is_busy_and_says_when_to_come_back():
    writer = ApplyThread(1)
    release = blocked(writer)
    waiting = in_thread(lambda: writer.run(lambda: None))
    while writer.queued < 1:
        pass
    with pytest.raises(Rejected) as refused:
        writer.run(lambda: None)
    assert refused.value.reason is ErrorCode.BUSY
    assert refused.value.retry_seconds > 0
    release.set()
    waiting.join()
    writer.close()


def test_closing_finishes_what_is_queued():
    writer, done = ApplyThread(8), []
    release = blocked(writer)
    waiting = [in_thread(lambda i=i: writer.run(lambda: done.append(i))) for i in range(4)]
    while writer.queued < 4:
        pass
    closing = in_thread(writer.close)
    release.set()
    closing.join()
    for each in waiting:
        each.join()
    assert sorted(done) == [0, 1, 2, 3]


def test_a_job_after_the_end_is_refused_and_leaves_nobody_waiting():
    writer, refusals = ApplyThread(4), []
    writer.close()

    def late():
        try:
            writer.run(lambda: None)
        except Rejected as refusal:
            refusals.append(refusal.reason)

    in_thread(late).join(timeout=10)
    assert refusals == [ErrorCode.DRAINING]
