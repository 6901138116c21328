"""What a terminal or a log shows of others' words moves no cursor and forges no line, whoever wrote them."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch

import psclient
from psclient.errors import SparsepsError
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import (
    ParameterServerServiceServicer,
    add_ParameterServerServiceServicer_to_server,
)
from tests.system.tools import QUICK

EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\nforged line"


class Liar(ParameterServerServiceServicer):
    """A server that answers every call, with words that a terminal would obey."""

    def GetStatus(self, request, context):  # noqa: N802
        worker = pb.WorkerStatus(worker_id=EVIL, incarnation=EVIL)
        return pb.GetStatusResponse(
            run_id=EVIL,
            generation=1,
            run_state=pb.RUN_STATE_TRAINING,
            method=EVIL,
            num_shards=1,
            device=EVIL,
            durability="journal",
            snapshot_checkpoint=EVIL,
            snapshot_age_seconds=1.0,
            workers=[worker],
            evicted=[pb.EvictedWorker(worker_id=EVIL, remaining_seconds=5)],
        )

    def FinishRun(self, request, context):  # noqa: N802
        return pb.FinishRunResponse(final_model=EVIL)

    def TakeSnapshot(self, request, context):  # noqa: N802
        return pb.TakeSnapshotResponse(checkpoint=EVIL, path=EVIL)

    def ListCheckpoints(self, request, context):  # noqa: N802
        return pb.ListCheckpointsResponse(checkpoints=[pb.CheckpointStatus(checkpoint=EVIL, named=True)])

    def RestoreModel(self, request, context):  # noqa: N802
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, EVIL)

    def EvictWorker(self, request, context):  # noqa: N802
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, EVIL)

    def Drain(self, request, context):  # noqa: N802
        return pb.DrainResponse(draining=True)

    def Join(self, request, context):  # noqa: N802
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, EVIL)

    DownloadModel = RestoreModel


@pytest.fixture(scope="module")
def liar():
    server = grpc.server(ThreadPoolExecutor(4))
    add_ParameterServerServiceServicer_to_server(Liar(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait(10)


COMMANDS = [
    ["psservice", "status", "ADDRESS"],
    ["psservice", "workers", "ADDRESS"],
    ["psservice", "top", "ADDRESS", "--once", "--interval", "0.1"],
    ["psservice", "finish", "ADDRESS"],
    ["psservice", "checkpoint", "create", "ADDRESS"],
    ["psservice", "checkpoint", "list", "ADDRESS"],
    ["psservice", "restore", "ADDRESS", "--version", "1"],
    ["psservice", "evict", "somebody", "ADDRESS"],
    ["psservice", "drain", "ADDRESS"],
    ["psclient", "save", "ADDRESS", "--out", "FILE", "--timeout", "2"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[1])
def test_a_command_prints_what_a_server_says_without_obeying_it(liar, command, tmp_path):
    arguments = [liar if each == "ADDRESS" else str(tmp_path / "m") if each == "FILE" else each for each in command]
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "400", "TERM": "xterm"},
    )
    said = done.stdout + done.stderr
    assert "owned" in said, said
    for line in said.splitlines():
        assert line.isprintable(), ascii(line)
        assert not line.startswith("forged")


def test_a_workers_error_shows_what_a_server_says_without_obeying_it(liar):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(SparsepsError) as caught:
        psclient.DGS(model.parameters(), lr=0.1, model=model, server=liar, settings=QUICK)
    assert "owned" in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_line_of_the_log_is_one_line(form):
    script = (
        "import logging, sys\n"
        "from psservice.observability import log_lines as logs\n"
        f"logs.configure('info', {form!r})\n"
        "log = logging.getLogger('test')\n"
        "evil = sys.argv[1]\n"
        "log.warning('refused', extra={'detail': evil, 'worker': evil})\n"
        "log.warning('about ' + evil)\n"
        "try:\n"
        "    raise ValueError(evil)\n"
        "except ValueError:\n"
        "    log.exception('internal error')\n"
    )
    done = subprocess.run([sys.executable, "-c", script, EVIL], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stderr.splitlines()
    assert all(line.isprintable() for line in lines), done.stderr
    assert not any(line.startswith("forged") for line in lines)
    if form == "json":
        assert len([json.loads(line) for line in lines]) == 3
    else:
        assert sum(line[:1].isdigit() for line in lines) == 3
