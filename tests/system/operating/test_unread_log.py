"""A log that nobody reads holds up no call."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
import threading

import grpc
import pytest

from pscore.wire.errors import ErrorCode, details_of
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.system.raw import TIMEOUT, RawWorker
from tests.system.tools import wait_until

PIPE_BYTES = 4096


def waiting_bytes(pipe):
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_calls_are_answered_while_the_log_is_stuck(tmp_path):
    ready, told = os.pipe()
    command = ["psservice", "serve", "--listen", "127.0.0.1:0", "--metrics-listen", "", "--health-listen", ""]
    with subprocess.Popen(
        [sys.executable, "-m", *command, "--ready-fd", str(told)], pass_fds=(told,), stderr=subprocess.PIPE
    ) as server:
        os.close(told)
        with os.fdopen(ready) as line:
            address = line.readline().partition('"address": "')[2].partition('"')[0]
        assert fcntl.fcntl(server.stderr, fcntl.F_SETPIPE_SZ, PIPE_BYTES) == PIPE_BYTES
        worker = RawWorker(address, "w")
        worker.join()
        stranger = pb.WorkerIdentity(run_id=worker.identity.run_id, worker_id="stranger", incarnation="1")

        def is_full():
            with pytest.raises(grpc.RpcError) as refused:
                worker.stub.RenewLease(pb.RenewLeaseRequest(identity=stranger), timeout=TIMEOUT)
            assert details_of(refused.value).reason is ErrorCode.LEASE_EXPIRED
            return waiting_bytes(server.stderr) > PIPE_BYTES - 1024

        wait_until(is_full)
        for number in range(64):  # each is a line that does not fit
            is_full()
            worker.push([number], [1.0])
        threading.Thread(target=server.stderr.read, daemon=True).start()
        server.send_signal(signal.SIGTERM)
        assert server.wait(TIMEOUT) == 0
