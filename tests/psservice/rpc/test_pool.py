"""A lane's threads: who takes a job, and what waits."""

import asyncio
import threading
from functools import partial

from psservice.rpc.calls import Lane
from psservice.rpc.pool import Pool
from psservice.storage.environment import MACHINE

SECONDS = 60


def with_pool(threads, body):
    """Run ``body(pool)`` on an event loop, as a lane's calls do."""

    async def run():
        pool = Pool(Lane.WORK, threads, MACHINE)
        try:
            return await asyncio.wait_for(body(pool), SECONDS)
        finally:
            pool.close()

    return asyncio.run(run())


def test_long_jobs_have_a_thread_each_and_later_ones_begin_no_more():
    def work(together):
        together.wait(SECONDS)
        return threading.get_ident()

    async def body(pool):
        together = threading.Barrier(2)  # each job waits until the other has a thread as well
        both = [asyncio.wrap_future(pool.submit(partial(work, together))) for _ in range(2)]
        assert len(set(await asyncio.gather(*both))) == 2
        return {await asyncio.wrap_future(pool.submit(threading.get_ident)) for _ in range(50)}

    assert len(with_pool(2, body)) <= 2, "threads that are idle take the jobs, and no other begins"


def test_a_thread_that_takes_jobs_all_the_time_is_joined_by_no_other():
    async def body(pool):
        go_on = threading.Event()
        jobs = [pool.submit(partial(go_on.wait, SECONDS))]
        jobs += [pool.submit(threading.get_ident) for _ in range(20)]
        go_on.set()  # before the loop looks after the backlog
        return [await asyncio.wrap_future(job) for job in jobs][1:]

    assert len(set(with_pool(4, body))) == 1


def test_more_jobs_than_threads_wait_in_order_and_an_error_ends_its_job_alone():
    async def body(pool):
        go_on, begun, order = threading.Event(), threading.Barrier(3), []

        def hold():
            begun.wait(SECONDS)
            assert go_on.wait(SECONDS)

        held = [pool.submit(hold) for _ in range(2)]
        await asyncio.to_thread(begun.wait, SECONDS)

        def wait_in_line(number):
            order.append(number)
            if number == 1:
                raise ValueError(number)
            return number

        waiting = [asyncio.wrap_future(pool.submit(partial(wait_in_line, number))) for number in range(4)]
        assert not order
        go_on.set()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(job.result(SECONDS) is None for job in held)
        assert isinstance(ended.pop(1), ValueError)
        assert ended == [0, 2, 3]
        assert sorted(order) == [0, 1, 2, 3]

    with_pool(2, body)


def test_what_waits_when_the_pool_is_closed_is_done_first():
    async def body():
        pool = Pool(Lane.WORK, 1, MACHINE)
        go_on = threading.Event()
        jobs = [pool.submit(partial(go_on.wait, SECONDS))] + [pool.submit(lambda: True) for _ in range(5)]
        closing = threading.Thread(target=pool.close)
        closing.start()
        go_on.set()
        await asyncio.to_thread(closing.join, SECONDS)
        assert all(job.result(0) for job in jobs)

    asyncio.run(body())
