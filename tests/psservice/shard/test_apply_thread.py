"""The apply thread: one thread, in order."""

import threading

import pytest

from pscore.wire.errors import ErrorCode, Rejected
from psservice.apply_thread import ApplyThread


def in_thread(job):
    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    return thread


def test_jobs_run_one_at_a_time_on_one_thread_which_is_not_the_caller():
    apply_thread, seen = ApplyThread(), []
    callers = [in_thread(lambda: apply_thread.run(lambda: seen.append(threading.get_ident()))) for _ in range(8)]
    for caller in callers:
        caller.join()
    apply_thread.close()
    assert len(seen) == 8
    assert len(set(seen)) == 1
    assert threading.get_ident() not in seen


def test_a_job_returns_its_result_or_raises_its_error():
    apply_thread = ApplyThread()
    assert apply_thread.run(lambda: 42) == 42
    with pytest.raises(ZeroDivisionError):
        apply_thread.run(lambda: 1 / 0)
    assert apply_thread.run(lambda: "goes on") == "goes on"
    apply_thread.close()


def blocked(apply_thread):
    """Occupy the apply thread until the returned event is set."""
    running, release = threading.Event(), threading.Event()

    def job():
        running.set()
        release.wait()

    in_thread(lambda: apply_thread.run(job))
    running.wait()
    return release


def test_closing_finishes_what_is_queued():
    apply_thread, done = ApplyThread(), []
    release = blocked(apply_thread)
    waiting = [in_thread(lambda i=i: apply_thread.run(lambda: done.append(i))) for i in range(4)]
    while apply_thread._jobs.qsize() < 4:
        pass
    closing = in_thread(apply_thread.close)
    release.set()
    closing.join()
    for each in waiting:
        each.join()
    assert sorted(done) == [0, 1, 2, 3]


def test_a_job_after_the_end_is_refused_and_leaves_nobody_waiting():
    apply_thread, refusals = ApplyThread(), []
    apply_thread.close()

    def late():
        try:
            apply_thread.run(lambda: None)
        except Rejected as refusal:
            refusals.append(refusal.reason)

    in_thread(late).join(timeout=10)
    assert refusals == [ErrorCode.DRAINING]
