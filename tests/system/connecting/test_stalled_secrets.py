"""A file of secrets that cannot be read for a while, as on a mount that hangs, holds up nobody whose token is known."""

import os
import threading
from contextlib import suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from psclient.rpc.local_server import LocalServer
from pscore.net.channels import Security, open_channel
from pscore.wire.errors import ErrorCode
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from tests.system.connecting.test_rotated_tokens import is_known, replace
from tests.system.raw import TIMEOUT
from tests.system.tools import wait_until
from verify.client.wire import reason_of


def status(server, token):
    """Ask a server for its status with a token; raises ``grpc.RpcError``."""
    with open_channel(server.addresses[0], Security(token=token)) as channel:
        return ParameterServerServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT)


class Stalled:
    """A named pipe in a file's place: whoever reads the file waits, from the end of ``__init__`` until ``end``."""

    def __init__(self, path, server):
        pipe = path.with_suffix(".pipe")
        os.mkfifo(pipe)
        os.replace(pipe, path)
        self._asking = threading.Thread(target=self._ask, args=(server,))
        self._asking.start()  # with a token that only the changed file may have
        self._descriptors = []
        wait_until(lambda: self._is_read(path))

    def _ask(self, server):
        with suppress(grpc.RpcError):
            status(server, "unknown")

    def _is_read(self, path):
        with suppress(OSError):  # nobody reads
            self._descriptors.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        return self._descriptors

    def end(self, content=""):
        for descriptor in self._descriptors:
            os.write(descriptor, content.encode())
            os.close(descriptor)
        self._asking.join(TIMEOUT)


def test_a_token_file_that_cannot_be_read_keeps_no_known_token_waiting_nor_health_nor_the_end(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("reader known\n")
    with LocalServer(tokens=tokens, health_listen="127.0.0.1:0") as server:
        assert is_known(server, "known")
        stalled = Stalled(tokens, server)
        try:
            with grpc.insecure_channel(server.health_addresses[0]) as channel:
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert status(server, "known").server_version
            with pytest.raises(grpc.RpcError) as refused:
                status(server, "new")
            assert reason_of(refused.value) == ErrorCode.UNAUTHENTICATED.name
            replace(tokens, "reader known\nreader new\n")
        finally:
            stalled.end("reader other\n")
        assert status(server, "new").server_version, "a token that the file has is known at once"
        stalled = Stalled(tokens, server)
        try:
            (process,) = server.processes
            process.terminate()
            assert process.wait(TIMEOUT) == 0
        finally:
            stalled.end()
