"""Requests that wait: for a thread, for the apply thread, for a push of their worker."""

import asyncio
import threading
import time

import grpc
import pytest

from pscore.wire.errors import ErrorCode
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.app.server import Server
from psservice.rpc.auth import Authenticator
from psservice.rpc.calls import NotYetError
from psservice.rpc.dispatcher import Dispatcher
from psservice.rpc.file_watcher import FileWatcher
from psservice.settings import ServerSettings
from tests.psservice.shard_makers import ANNA, open_shards
from tests.system.connecting.test_raw_client import TIMEOUT, RawWorker
from verify.client.wire import reason_of


def wait_until(condition):
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_pushes_beyond_the_limit_of_requests_at_work_are_busy():
    """Also of those that wait for a thread: there are fewer threads than the limit admits."""
    server = Server(
        ServerSettings(listen="127.0.0.1:0", health_listen="", metrics_listen="", apply_queue_limit=6, rpc_threads=4)
    )
    release, pushing = threading.Event(), []
    try:
        workers = [RawWorker(server.address, f"w{number}") for number in range(7)]
        for worker in workers:
            worker.join()
        held = threading.Thread(target=server.shard.apply_thread.run, args=(release.wait,))
        held.start()
        for worker in workers[:6]:
            pushing.append(threading.Thread(target=worker.push, args=([1], [1.0])))
            pushing[-1].start()
        wait_until(lambda: server._metrics.registry.get_sample_value("psservice_queued") == 6)
        assert workers[6].stub.GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT).queued == 6
        drained = workers[6].stub.Drain(pb.DrainRequest(action=pb.DRAIN_ACTION_CLOSE), timeout=TIMEOUT)
        assert (drained.calls_inside, drained.queued) == (6, 6)
        workers[6].stub.Drain(pb.DrainRequest(action=pb.DRAIN_ACTION_OPEN), timeout=TIMEOUT)
        with pytest.raises(grpc.RpcError) as refused:
            workers[6].push([1], [1.0])
        assert reason_of(refused.value) == ErrorCode.BUSY.name
    finally:
        release.set()
        for each in (held, *pushing):
            each.join(TIMEOUT)
        server.stop()


class Waiting:
    """A pull that waits for its worker's push."""

    def __init__(self, dispatcher, *, is_over=False):
        self.started = time.monotonic()
        early = NotYetError(ANNA, lambda: is_over)
        self.task = asyncio.ensure_future(dispatcher._until_pushed(self, early))

    async def wait(self, client, until, why):
        return await client


def dispatcher_of(shard):
    return Dispatcher({}, Authenticator(None, FileWatcher()), shard)


def test_a_pull_that_is_cancelled_leaves_the_event_of_a_later_pull_alone():
    async def scenario(dispatcher):
        first = Waiting(dispatcher)
        await asyncio.sleep(0)
        pushed = dispatcher._waiting.pop(ANNA)  # the push has been answered
        second = Waiting(dispatcher)  # begins to wait for the next push before the first pull has gone on
        await asyncio.sleep(0)
        first.task.cancel()
        await asyncio.gather(first.task, return_exceptions=True)
        pushed.set()
        dispatcher._waiting.pop(ANNA).set()  # the next push is answered
        await asyncio.wait_for(second.task, TIMEOUT)
        await Waiting(dispatcher, is_over=True).task
        assert not dispatcher._waiting, "nothing is kept of a pull that need not wait"

    with open_shards() as (shard,):
        dispatcher = dispatcher_of(shard)
        try:
            asyncio.run(scenario(dispatcher))
        finally:
            dispatcher.close()
