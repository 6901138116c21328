"""How much memory a server takes to begin again does not follow from how much journal is kept."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from psclient.rpc.local_server import LocalServer
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.psservice.durability.test_recovery import Shard, after_a_crash, send
from tests.psservice.service_makers import F32, layout_of, sparse_push
from tests.psservice.shard_makers import ANNA, join, upload
from verify.failpoint.copies import image

LAYOUT = layout_of((400_000, F32))
PUSHES, DENSITY = 300, 0.5
STARTS = 4


def most_memory(directory: Path) -> int:
    """Bytes that a server ever takes which begins from a directory.

    The least of some starts: other load moves by tens of megabytes what a start has freed before it takes more.
    """
    return min(_most_memory_once(directory) for _ in range(STARTS))


def _most_memory_once(directory: Path) -> int:
    with LocalServer(data_dir=directory) as server:
        lines = Path(f"/proc/{server.processes[0].pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for a process's memory")
def test_a_long_journal_before_the_snapshot_takes_no_memory_to_begin_from(tmp_path):
    with Shard(tmp_path / "live") as engine:
        upload(engine, torch.zeros(LAYOUT.size), ANNA, join(engine, LAYOUT).generation)
        first = engine.durability.last_snapshot
        push = sparse_push(engine.span, DENSITY, 1)
        for step in range(1, PUSHES + 1):
            send(engine, step, push, codec=pb.VALUE_CODEC_SIGN_MEAN, chunk_bytes=1 << 20)
        engine.durability.take()
        long = after_a_crash(tmp_path / "live")
    short = tmp_path / "short"
    image(long, short)
    shard = short / "shard-0-of-1"
    shutil.rmtree(shard / first.path.relative_to(first.path.parents[1]))
    (shard / "journal" / f"{first.manifest.segment:012d}.journal").unlink()
    supports = PUSHES * DENSITY * LAYOUT.size * 4
    assert supports > 200 << 20
    assert most_memory(long) - most_memory(short) < 48 << 20
