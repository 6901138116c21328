"""Every file of corpus/ is pushed to a server, which refuses it, keeps its model bit for bit, and does not grow."""

import re
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest

import psclient
from psclient.errors import from_rpc_error
from psclient.rpc.local_server import LocalServer
from pscore.model.layout import Span
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.hostile.corpus_files import corpus
from tests.system.raw import TIMEOUT, RawWorker

SIZE = 1 << 16
MOST_GROWTH = 8 << 20
"""What a push of a few hundred bytes may add to the server's memory: threads and arenas come and go by so much."""


def restart_memory_peak(process: int) -> int:
    """Let the kernel forget the most memory that a process has had; return what it has now."""
    Path(f"/proc/{process}/clear_refs").write_text("5")
    return memory_peak(process)


def memory_peak(process: int) -> int:
    """Return the most memory that a process has had, in bytes."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)[1]) << 10


@pytest.fixture(scope="module")
def worker():
    """A worker of a server whose model has a value of its own in every element."""
    with LocalServer(down_mode="exact", lease_seconds=120) as server:
        raw = RawWorker(server.addresses[0], "raw", SIZE)
        raw.theta[:] = np.arange(SIZE)
        raw.join()
        raw.pull()
        raw.server, raw.process = server.server, server.processes[0].pid
        raw.push([3], [0.5])  # whatever is imported or allocated at the first push is there now
        raw.pull()
        yield raw


def push(worker: RawWorker, chunk: pb.Chunk) -> grpc.RpcError:
    """Push a chunk and return the answer, which must be a refusal."""
    messages = [pb.PushSparseRequest(header=worker.push_header()), pb.PushSparseRequest(chunks=[chunk])]
    with pytest.raises(grpc.RpcError) as caught:
        next(worker.stub.PushSparse(iter(messages), timeout=TIMEOUT))
    return caught.value


@pytest.mark.skipif(sys.platform != "linux", reason="reads the server's memory from /proc")
@pytest.mark.parametrize("each", [pytest.param(1, marks=pytest.mark.long), 10], ids=["every file", "every tenth file"])
def test_a_server_refuses_every_hostile_chunk_and_is_the_same_afterwards(each, worker):
    before = psclient.download(worker.server)["w"].numpy().tobytes()
    version = worker.version
    model = Span(0, SIZE)
    for hostile in corpus()[::each]:
        for _ in range(3):  # the server may load its compiled loops meanwhile, once; a chunk's own growth comes again
            most = restart_memory_peak(worker.process) + MOST_GROWTH
            answer = push(worker, hostile.chunk)
            if memory_peak(worker.process) <= most:
                break
        else:
            pytest.fail(f"{hostile.name} makes the server grow by more than {MOST_GROWTH} bytes")
        refusal = from_rpc_error(answer)
        assert isinstance(refusal, Rejected), (hostile.name, answer)
        if (
            refusal.reason is ErrorCode.BAD_REQUEST
        ):  # more entries than a stream of this shard may hold: not even decoded
            assert hostile.chunk.count > SIZE, hostile.name
            assert answer.code() is grpc.StatusCode.INVALID_ARGUMENT, hostile.name
        else:
            assert (answer.code().name, refusal.reason) == (hostile.reason.status_name, hostile.reason), hostile.name
            inside = hostile.chunk.start + hostile.chunk.length <= model.end
            assert (hostile.says if inside else "lies outside") in str(refusal), hostile.name
        assert psclient.download(worker.server)["w"].numpy().tobytes() == before, hostile.name
    worker.pull()
    assert worker.version == version
    assert worker.push([3], [0.5]).version == version + 1, "and it still takes a good push"
