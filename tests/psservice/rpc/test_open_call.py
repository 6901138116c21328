"""The waits of a call for its client: each ends by its own time, by a cut, or by the client."""

import asyncio
import math
import threading
import time

import pytest
import torch

from pscore.wire.errors import ErrorCode, Rejected
from psservice.apply_thread import ApplyThread
from psservice.rpc.auth import ANONYMOUS_ADMIN
from psservice.rpc.calls import RULES, Call, Lane
from psservice.rpc.open_call import OpenCall, StalledError
from psservice.rpc.pool import Pool
from psservice.storage.environment import MACHINE


def in_a_call(body):
    async def run():
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        pool = Pool(Lane.WORK, 1, MACHINE)
        call = Call("PullDiff", ANONYMOUS_ADMIN)
        opened = OpenCall(call, None, RULES["PullDiff"], pool, print, loop, task, time.monotonic())
        try:
            return await body(opened, loop)
        finally:
            opened.end()

    return asyncio.run(run())


async def answer(value, waits=0):
    for _ in range(waits):
        await asyncio.sleep(0)
    return value


def test_a_wait_returns_what_the_client_sends_and_leaves_one_timer():
    async def body(opened, loop):
        timers = set()
        for number in range(20):
            assert await opened.wait(answer(number, number % 3), time.monotonic() + 60, "idle") == number
            timers.add(opened.timer)
        assert opened.until is None
        return timers

    assert len(in_a_call(body)) == 1


@pytest.mark.parametrize("before", [0, 60])
def test_a_wait_ends_at_its_time_although_the_timer_was_set_for_another(before):
    async def body(opened, loop):
        if before:
            await opened.wait(answer(1), time.monotonic() + before, "long")
        with pytest.raises(StalledError, match="short"):
            await opened.wait(loop.create_future(), time.monotonic() + 0.02, "short")
        assert opened.task.cancelling() == 0

    in_a_call(body)


def test_a_timer_that_was_set_for_a_wait_that_has_ended_sets_itself_anew_and_cuts_nothing():
    async def body(opened, loop):
        await opened.wait(answer(1), time.monotonic() + 0.01, "first")
        assert await opened.wait(asyncio.sleep(0.05, "came"), time.monotonic() + 60, "second") == "came"
        await opened.wait(answer(1), time.monotonic() + 0.01, "third")
        await asyncio.sleep(0.05)  # of something else than the client
        assert await opened.wait(asyncio.sleep(0.05, "came"), math.inf, "idle") == "came"

    in_a_call(body)


def test_a_cut_ends_a_wait_and_nothing_else():
    async def body(opened, loop):
        opened.cut("early")  # it waits for nothing
        assert await opened.wait(answer(1, 2), math.inf, "") == 1
        loop.call_soon(opened.cut, "gave_way")
        with pytest.raises(StalledError, match="gave_way"):
            await opened.wait(loop.create_future(), math.inf, "")

    in_a_call(body)


def test_who_cancels_the_call_cancels_it_even_where_it_is_cut_too():
    async def body(opened, loop):
        loop.call_soon(opened.task.cancel)
        loop.call_soon(opened.cut, "late")
        with pytest.raises(asyncio.CancelledError):
            await opened.wait(loop.create_future(), math.inf, "")

    in_a_call(body)


@pytest.mark.parametrize(("error", "lines"), [(ZeroDivisionError(), 1), (Rejected(ErrorCode.BUSY, "full"), 0)])
def test_an_error_of_work_whose_client_has_gone_is_logged_unless_it_is_an_answer(error, lines, caplog):
    started, go_on = threading.Event(), threading.Event()

    def work():
        started.set()
        assert go_on.wait(30)
        raise error

    async def body(opened, loop):
        working = asyncio.ensure_future(opened.run(work))
        await loop.run_in_executor(None, started.wait)
        working.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await working

    in_a_call(body)
    assert [record.getMessage() for record in caplog.records] == ["internal error"] * lines


def test_torch_computes_alone_in_a_lanes_threads_and_with_all_threads_on_the_apply_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    pool = Pool(Lane.WORK, 2, MACHINE)
    try:
        together = threading.Barrier(2)

        async def in_the_lane():
            jobs = [pool.submit(lambda: (together.wait(30), torch.get_num_threads())[1]) for _ in range(2)]
            return await asyncio.gather(*map(asyncio.wrap_future, jobs))

        assert asyncio.run(in_the_lane()) == [1, 1]
        apply_thread = ApplyThread()
        assert apply_thread.run(torch.get_num_threads) == 3
        apply_thread.close()
        assert torch.get_num_threads() == 3
    finally:
        pool.close()
        torch.set_num_threads(before)
