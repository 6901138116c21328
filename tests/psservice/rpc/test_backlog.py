"""Requests that wait for a thread, or for the apply thread."""

import threading
import time

import grpc
import pytest

from pscore.wire.errors import ErrorCode
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.process.server import Server
from psservice.settings import ServerSettings
from tests.system.raw import TIMEOUT, RawWorker
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
