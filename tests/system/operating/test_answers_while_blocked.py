"""Health and metrics are answered while the event loop or the thread of the parameters is blocked.

``test_stalled_disk.py`` has the same for a disk.
"""

import threading
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from psservice.process.server import Server
from psservice.settings import ServerSettings
from tests.system.raw import TIMEOUT, RawWorker

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Block:
    """Something that runs until it is released."""

    def __init__(self):
        self.begun, self.released = threading.Event(), threading.Event()

    def __call__(self):
        self.begun.set()
        assert self.released.wait(10 * TIMEOUT)


def block_loop(server, block):
    server._loop.loop.call_soon_threadsafe(block)


def block_executor(server, block):
    threading.Thread(target=server.shard.apply_thread.run, args=(block,), daemon=True).start()


@pytest.mark.parametrize("begin", [block_loop, block_executor])
def test_health_and_metrics_are_answered_meanwhile(begin):
    server = Server(ServerSettings(listen="127.0.0.1:0", health_listen="127.0.0.1:0", metrics_listen="127.0.0.1:0"))
    block = Block()
    try:
        worker = RawWorker(server.address, "w")
        worker.join()
        worker.push([1], [1.0])
        begin(server, block)
        assert block.begun.wait(TIMEOUT)
        with grpc.insecure_channel(server.health_address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            assert stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT).status == SERVING
            changes = stub.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
            assert next(changes).status == SERVING
            for page, text in (("metrics", "psservice_live_workers 1.0"), ("status.json", '"version": 1,')):
                with urllib.request.urlopen(f"http://{server.metrics_address}/{page}", timeout=TIMEOUT) as answer:
                    assert text in answer.read().decode()
            server.shard.drain_gate.is_closed = True
            server.update_health()
            assert next(changes).status == NOT_SERVING
        assert not block.released.is_set()
    finally:
        block.released.set()
        server.stop()
