"""Answers that nobody reads: the call is cut, who goes away meanwhile goes in silence, and neither fills the log."""

import grpc
import pytest

from psclient.rpc.local_server import LocalServer
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from tests.system.operating.asking import metrics
from tests.system.raw import RawWorker
from tests.system.tools import wait_until

CALLS = 20
SIZE = 900_000
NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14), ("grpc.use_local_subchannel_pool", 1))


@pytest.mark.parametrize("patience", [1.0, 60.0], ids=["cut by the server", "given up by the client"])
def test_answers_that_nobody_reads_leave_no_error_in_the_log(patience, tmp_path):
    with (
        (tmp_path / "log").open("w") as log,
        LocalServer(log_to=log, stream_idle_seconds=patience, lease_seconds=60) as server,
    ):
        worker = RawWorker(server.addresses[0], "w", SIZE)
        worker.join()
        stub = ParameterServerServiceStub(grpc.insecure_channel(server.addresses[0], NARROW))
        calls = [stub.DownloadModel(pb.DownloadModelRequest(), timeout=60) for _ in range(CALLS)]
        for call in calls:
            next(call)
        if patience < 60:
            cut = 'why="idle_reader"'
            wait_until(lambda: f"{cut}}} {CALLS}.0" in metrics(server))
        for call in calls:
            call.cancel()
        wait_until(lambda: "psservice_bytes_in_flight 0.0" in metrics(server))
        assert worker.push([1], [1.0]).version == 1
    assert "Traceback" not in (tmp_path / "log").read_text()
