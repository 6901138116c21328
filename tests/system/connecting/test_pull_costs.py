"""What pulls may cost a server: it keeps what pushes overwrite while they are read, and images have half the memory."""

import contextlib
import re
import uuid
from pathlib import Path

import grpc
import numpy as np
import pytest

from psclient.rpc.local_server import LocalServer
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from tests.system.operating.asking import metric
from tests.system.raw import TIMEOUT, RawWorker, chunk_of, refusal
from tests.system.tools import wait_until
from tests.tiers import long_but

CHUNK, LARGE = 250_000, 4_000_000
ROOM = 12_000_000  # less than one model
IMAGES, IN_FLIGHT, MEMORY = "psservice_image_bytes", "psservice_bytes_in_flight", "psservice_memory_bytes"
NARROW = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
"""Of a channel with a connection of its own, on which little is sent ahead."""


def member(server, size):
    """A worker that has joined; the first has uploaded zeros."""
    worker = RawWorker(server.addresses[0], str(uuid.uuid4()), size)
    worker.join()
    return worker


def pull(worker, last=None):
    """Pull; return the header, acknowledging an earlier one."""
    request = worker.pull_request()
    if last is not None:
        request.has_base, request.base_version = True, last.version
        request.acknowledged_reply, request.image = last.reply_number, last.image
    header, *_ = worker.stub.PullDiff(iter([request]), timeout=TIMEOUT)
    return header.header


@contextlib.contextmanager
def unread(server, worker):
    """A pull of everything of which only the header and a chunk are read, on a connection of its own."""
    with grpc.insecure_channel(server.addresses[0], options=NARROW) as channel:
        call = ParameterServerServiceStub(channel).PullDiff(iter([worker.pull_request()]))
        next(call), next(call)
        yield call
        call.cancel()


def test_where_the_room_of_images_is_used_up_replies_are_exact():
    with LocalServer(down_mode="topk", down_dense_below=0, memory_bytes=10_000) as server:
        w0 = member(server, 1000)
        first = pull(w0)
        assert (first.mode, first.image) == (pb.REPLY_MODE_EXACT, True)
        held = metric(server, IMAGES)
        assert 4000 <= held <= 5000
        w1 = member(server, 1000)
        assert not pull(w1).image, "one image is all that fits"
        assert pull(w0, first).mode == pb.REPLY_MODE_TOPK
        w0.stub.Leave(pb.LeaveRequest(identity=w0.identity), timeout=TIMEOUT)
        wait_until(lambda: metric(server, IMAGES) == 0)
        assert pull(w1).image
        assert metric(server, IMAGES) == held


def test_without_room_no_reply_is_top_k():
    with LocalServer(down_mode="topk", memory_bytes=1) as server:
        w0 = member(server, 1000)
        first = pull(w0)
        assert (first.mode, first.image) == (pb.REPLY_MODE_EXACT, False)
        assert not pull(w0, first).image


def push_all(worker):
    index, ones = range(CHUNK), np.ones(CHUNK)
    return worker.push_chunks(*(chunk_of(index, ones, start=i, length=CHUNK) for i in range(0, LARGE, CHUNK)))


def test_two_dense_pulls_that_nobody_reads_refuse_nobody_and_keep_nothing():
    """The limit is that of one shard."""
    with LocalServer(down_mode="exact", memory_bytes=4 * LARGE, compute_threads=1) as server:
        w0, w1 = member(server, LARGE), member(server, LARGE)
        with unread(server, w0) as first, unread(server, w1) as second:
            assert metric(server, IN_FLIGHT) == 0
            assert sum(len(chunk.values) for message in first for chunk in message.chunks) > 3.5 * LARGE
            assert sum(len(chunk.values) for message in second for chunk in message.chunks) > 3.5 * LARGE


@pytest.mark.long
def test_a_slow_pull_keeps_no_push_out_and_counts_what_is_kept_for_it():
    with LocalServer(down_mode="exact", memory_bytes=96 * LARGE, compute_threads=1) as server:
        w0, w1 = member(server, LARGE), member(server, LARGE)
        with unread(server, w0), unread(server, w0):
            for version in range(1, 4):
                assert push_all(w1).version == version
                wait_until(lambda: 3.5 * LARGE < metric(server, IN_FLIGHT) < 9 * LARGE)  # each element's value once
            assert pull(w1).version == 3, "another copy has room beside the first"
        wait_until(lambda: metric(server, IN_FLIGHT) == 0)


@pytest.mark.long
def test_while_what_is_kept_exceeds_the_share_of_answers_no_copy_is_opened_and_pushes_go_on():
    with LocalServer(down_mode="exact", memory_bytes=9 * LARGE, compute_threads=1) as server:
        w0, w1 = member(server, LARGE), member(server, LARGE)
        with unread(server, w0):
            w1.push_chunks(*(chunk_of(range(CHUNK), np.ones(CHUNK), start=LARGE - CHUNK, length=CHUNK),))
            assert pull(w1).version == 1, "little is kept"
            assert push_all(w1).version == 2
            assert refusal(lambda: pull(w1))[0] == "RESOURCE_EXHAUSTED"
            assert push_all(w1).version == 3
        wait_until(lambda: metric(server, IN_FLIGHT) == 0)
        assert pull(w1).version == 3


def test_a_reply_that_is_kept_for_the_next_pull_counts_until_the_model_changes():
    with LocalServer(down_mode="exact") as server:
        w0, w1 = member(server, LARGE), member(server, LARGE)
        first = pull(w1)
        w0.push_chunks(chunk_of(range(CHUNK), np.ones(CHUNK), length=CHUNK))
        pull(w1, first)
        wait_until(lambda: metric(server, IN_FLIGHT) == 0)
        assert metric(server, MEMORY) > 4 * CHUNK
        w0.push_chunks(chunk_of(range(CHUNK), np.ones(CHUNK), length=CHUNK))
        wait_until(lambda: metric(server, MEMORY) == 0)


def test_a_model_that_a_restore_has_replaced_counts_as_long_as_it_is_read(tmp_path):
    with LocalServer(down_mode="exact", data_dir=tmp_path, compute_threads=1) as server:
        worker = member(server, LARGE)
        taken = worker.stub.TakeSnapshot(pb.TakeSnapshotRequest(checkpoint="first"), timeout=TIMEOUT)
        with unread(server, worker):
            assert metric(server, IN_FLIGHT) == 0
            worker.stub.RestoreModel(pb.RestoreModelRequest(checkpoint=taken.checkpoint), timeout=TIMEOUT)
            assert metric(server, IN_FLIGHT) == 4 * LARGE
        wait_until(lambda: metric(server, IN_FLIGHT) == 0)


def is_refused(server):
    worker = member(server, LARGE)
    assert refusal(lambda: pull(worker))[0] == "RESOURCE_EXHAUSTED"


def resident(pid):
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


@pytest.mark.parametrize("down_mode", long_but(["topk"], ["topk", "exact"]))
def test_pulls_that_are_refused_cost_no_memory_and_leave_no_image(down_mode):
    with LocalServer(down_mode=down_mode, memory_bytes=9 * LARGE, compute_threads=1) as server:
        w0, w1 = member(server, LARGE), member(server, LARGE)
        pull(w0)
        images = metric(server, IMAGES) if down_mode == "topk" else 0
        with unread(server, w0):
            push_all(w1)  # so the server keeps the values of the unread reply
            for _ in range(4):  # what a server needs for its first of anything stays
                is_refused(server)
            before = resident(server.processes[0].pid)
            for _ in range(16):
                is_refused(server)
            assert resident(server.processes[0].pid) < before + ROOM
        assert metric(server, IMAGES) == images
