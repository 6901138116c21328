"""An ``fsync`` of the journal that fails under load: the server says so on every port, refuses pushes, and ends."""

import contextlib
import signal
import threading

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import psclient
import psclient.rpc.local_server
from psclient.rpc.local_server import LocalServer
from pscore.wire.errors import ErrorCode
from tests.faults import spawner
from tests.system.raw import TIMEOUT, RawWorker
from tests.system.tools import wait_until
from tests.tiers import long_but
from verify.client.wire import reason_of

WORKERS = 4
STATES = health_pb2.HealthCheckResponse


class Pusher(RawWorker):
    """Pushes 1 to an entry of its own, again and again, until a push is refused."""

    def __init__(self, address: str, number: int) -> None:
        super().__init__(address, f"w{number}")
        self.number, self.refusal = number, ""
        self.thread = threading.Thread(target=self._push, daemon=True)

    def _push(self) -> None:
        try:
            while True:
                self.push([self.number], [1.0])
        except grpc.RpcError as error:
            self.refusal = reason_of(error)


def states(address: str) -> list[int]:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return [
            stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT).status for name in ("", "liveness")
        ]


@pytest.mark.parametrize("error", long_but(["EIO"], ["EIO", "ENOSPC"]))
@pytest.mark.parametrize("fsync", ["interval", "always"])
def test_health_answers_workers_are_refused_and_sigterm_ends_the_process(tmp_path, monkeypatch, error, fsync):
    fault = tmp_path / "fault"
    monkeypatch.setattr(psclient.rpc.local_server, "spawn", spawner(f"{error}-journal", fault))
    settings = {"fsync": fsync, "fsync_interval_seconds": 0.05, "health_listen": "127.0.0.1:0"}
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((tmp_path / "log").open("w"))
        server = stack.enter_context(LocalServer(data_dir=tmp_path / "data", log_to=log, **settings))
        workers = [Pusher(server.addresses[0], number) for number in range(WORKERS)]
        for worker in workers:
            stack.callback(worker.channel.close)
            worker.join()
        for worker in workers:
            worker.thread.start()
        wait_until(lambda: all(worker.step > 20 for worker in workers))
        assert states(server.health_addresses[0]) == [STATES.SERVING] * 2
        fault.touch()
        for worker in workers:
            worker.thread.join(TIMEOUT)
        assert [worker.refusal for worker in workers] == [ErrorCode.NOT_DURABLE.name] * WORKERS
        for address in (server.health_addresses[0], server.addresses[0]):
            assert states(address) == [STATES.NOT_SERVING] * 2
        server.processes[0].send_signal(signal.SIGTERM)
        assert server.processes[0].wait(TIMEOUT) == 0
        assert "journal broken" in (tmp_path / "log").read_text()
        fault.unlink()
        server.restart()
        kept = psclient.download(server.server)["w"].numpy()
        acknowledged = np.array([worker.step - 1 for worker in workers])
        assert np.all(-kept[:WORKERS] >= acknowledged)
        assert np.all(-kept[:WORKERS] <= acknowledged + 1)
