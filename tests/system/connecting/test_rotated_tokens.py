"""Tokens are rotated as docs/operate/security.md says, while a worker trains and an operator's client stays."""

import contextlib
import os
import queue
import subprocess
import sys
import threading

import pytest
import torch

import psclient
from psclient import LocalServer
from psclient.errors import AccessError
from psclient.rpc.channel import Connection
from psclient.settings import ClientSettings
from pscore.net.channels import Security, open_channel
from pscore.wire.errors import ErrorCode
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from psservice.ctl.client import ShardClients
from tests.system.raw import RawWorker, Stream, pull_of, push_of
from tests.system.scripts import marked
from tests.system.tools import wait_until

STEP_SECONDS = 60.0


class SteadyWorker:
    """A process of :mod:`tests.system.steady_worker` with a token file; its lines are read as they come."""

    def __init__(self, server, token_file):
        environment, _ = marked(PSCLIENT_TOKEN_FILE=str(token_file))
        command = [sys.executable, "-m", "tests.system.steady_worker", server, "w0", "plain"]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _until(self, word):
        seen = []
        while True:
            seen.append(self._lines.get(timeout=STEP_SECONDS))
            if seen[-1].startswith(word):
                return
            assert seen[-1], f"the worker has ended: {''.join(seen)}"

    def steps(self, count):
        """Wait until so many more steps were made."""
        while not self._lines.empty():
            assert self._lines.get(), "the worker has ended"
        for _ in range(count):
            self._until("step")

    def tell(self, command):
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        self._until("done")


@contextlib.contextmanager
def steady_worker(server, token_file):
    worker = SteadyWorker(server.server, token_file)
    try:
        yield worker
    finally:
        worker.process.kill()
        worker.process.wait()


def replace(path, text):
    """Write a file in one step, as a rotation should."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def is_known(server, token):
    """Whether the server admits a token."""
    with ShardClients(server.addresses, 10.0, Security(token=token)) as clients:
        return clients.one(server.addresses[0], "GetStatus", pb.GetStatusRequest()).error is None


def test_a_worker_trains_on_and_an_operator_asks_on_while_tokens_are_rotated(tmp_path):
    tokens, held, admin = tmp_path / "tokens", tmp_path / "held", tmp_path / "admin"
    tokens.write_text("worker worker-0\nadmin admin-0\n")
    held.write_text("worker-0\n")
    admin.write_text("admin-0\n")
    with (
        LocalServer(tokens=tokens, down_mode="exact") as server,
        steady_worker(server, held) as worker,
        ShardClients(server.addresses, 10.0, Security(token_file=admin)) as operator,
    ):
        worker.steps(3)

        def status():
            return operator.one(server.addresses[0], "GetStatus", pb.GetStatusRequest())

        for old, new in ((0, 1), (1, 2)):
            both = "".join(f"worker worker-{n}\nadmin admin-{n}\n" for n in (old, new))
            replace(tokens, both)
            wait_until(lambda: is_known(server, f"worker-{new}"))  # noqa: B023
            replace(held, f"worker-{new}\n")
            replace(admin, f"admin-{new}\n")
            worker.steps(3)
            assert status().error is None
            replace(tokens, f"worker worker-{new}\nadmin admin-{new}\n")
            wait_until(lambda: not is_known(server, f"worker-{old}"))  # noqa: B023
            worker.steps(5)
            assert status().error is None
        worker.tell("rest")
        worker.tell(f"report {tmp_path / 'report'}")
        report = torch.load(tmp_path / "report")
        assert torch.equal(report["server"], -report["total"])  # no push was lost or made twice
        worker.tell("end")
        assert worker.process.wait(STEP_SECONDS) == 0


def test_a_worker_whose_file_is_for_a_moment_missing_or_empty_keeps_its_token(tmp_path, caplog):
    held = tmp_path / "held"
    held.write_text("worker-0\n")
    tokens = tmp_path / "tokens"
    tokens.write_text("worker worker-0\nworker worker-1\n")
    request = pb.GetStatusRequest()
    with LocalServer(tokens=tokens) as server:
        connection = Connection(server.addresses[0], Security(token_file=held))
        try:
            assert connection.stub.GetStatus(request, timeout=10)
            for broken in (held.unlink, lambda: held.write_text(""), lambda: held.write_text("worker-1\nworker-2\n")):
                broken()
                assert connection.stub.GetStatus(request, timeout=10)
                assert connection.stub.GetStatus(request, timeout=10)
                connection.reconnect(at_once=True)
                assert connection.stub.GetStatus(request, timeout=10)
            said = [line for line in caplog.messages if "the token before stays in use" in line]
            assert len(said) == 3, caplog.messages  # once for each change
            assert "worker-" not in caplog.text
            held.write_text("worker-1\n")
            replace(tokens, "worker worker-1\n")

            def is_let_in():
                return connection.stub.GetStatus(request, timeout=10) is not None

            wait_until(is_let_in)
        finally:
            connection.close()


def test_a_token_that_is_refused_is_not_tried_for_ever(tmp_path):
    held, tokens = tmp_path / "held", tmp_path / "tokens"
    held.write_text("nobody's\n")
    tokens.write_text("worker worker-0\n")
    w = torch.nn.Parameter(torch.zeros(8))
    with LocalServer(tokens=tokens) as server, pytest.raises(AccessError):
        psclient.ASGD([w], lr=0.1, server=server.server, settings=ClientSettings(token_file=held))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("worker secret another", ErrorCode.PERMISSION_DENIED),
        ("reader secret", ErrorCode.PERMISSION_DENIED),
        ("worker other", ErrorCode.UNAUTHENTICATED),
    ],
)
def test_each_request_of_an_open_stream_is_judged_by_the_tokens_of_that_moment(line, reason, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("worker secret w\n")
    with (
        LocalServer(tokens=tokens, down_mode="exact", lease_seconds=60) as server,
        open_channel(server.addresses[0], Security(token="secret")) as channel,
    ):
        worker = RawWorker(server.addresses[0], "w", 50)
        worker.stub = ParameterServerServiceStub(channel)
        worker.join()
        worker.pull()
        pushes, pulls = Stream(worker.stub.PushSparse), Stream(worker.stub.PullDiff)
        pushes.send(*push_of(worker, 1, base=worker.version))
        assert next(pushes.call).version == worker.version + 1
        pulls.send(pull_of(worker, base_version=worker.version))
        while not next(pulls.call).HasField("commit"):
            pass
        replace(tokens, f"{line}\nreader new\n")
        wait_until(lambda: is_known(server, "new"))
        pushes.send(*push_of(worker, 2, base=worker.version))
        assert pushes.reason() is reason
        pulls.send(pull_of(worker, base_version=worker.version))
        assert pulls.reason() is reason
