"""A lane's threads: who takes a job, and what waits."""

import threading
from functools import partial

import pytest

from psservice.rpc.calls import Lane
from psservice.rpc.pool import Pool
from psservice.storage.environment import MACHINE


@pytest.fixture
def pool():
    found = Pool(Lane.WORK, 2, MACHINE)
    yield found
    found.close()


def test_jobs_at_once_have_a_thread_each_and_later_ones_begin_no_more(pool):
    def work(go_on):
        assert go_on.wait(60)
        return threading.get_ident()

    together = threading.Event()
    both = [pool.submit(partial(work, together)) for _ in range(2)]
    together.set()
    assert len({job.result(60) for job in both}) == 2
    found = {pool.submit(threading.get_ident).result(60) for _ in range(50)}
    assert len(found) <= 2, "threads that are idle take the jobs, and no other begins"


def test_more_jobs_than_threads_wait_in_order_and_an_error_ends_its_job_alone(pool):
    go_on, begun, order = threading.Event(), threading.Barrier(3), []

    def hold():
        begun.wait(60)
        assert go_on.wait(60)

    held = [pool.submit(hold) for _ in range(2)]
    begun.wait(60)

    def wait_in_line(number):
        order.append(number)
        if number == 1:
            raise ValueError(number)
        return number

    waiting = [pool.submit(partial(wait_in_line, number)) for number in range(4)]
    assert not order
    go_on.set()
    for job in held:
        job.result(60)
    assert isinstance(waiting[1].exception(60), ValueError)
    assert [waiting[number].result(60) for number in (0, 2, 3)] == [0, 2, 3]
    assert sorted(order) == [0, 1, 2, 3]


def test_what_waits_when_the_pool_is_closed_is_done_first():
    pool = Pool(Lane.WORK, 1, MACHINE)
    go_on = threading.Event()
    jobs = [pool.submit(partial(go_on.wait, 60))] + [pool.submit(lambda: True) for _ in range(5)]
    closing = threading.Thread(target=pool.close)
    closing.start()
    go_on.set()
    closing.join(60)
    assert all(job.result(0) for job in jobs)
