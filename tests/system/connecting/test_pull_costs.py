"""What pulls may cost a server: they are charged before anything is built, and images have a budget."""

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

CHUNK, LARGE, ROOM = 250_000, 4_000_000, 64 << 20
IMAGES, IN_FLIGHT = "psservice_image_bytes", "psservice_bytes_in_flight"
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


def is_refused(server):
    worker = member(server, LARGE)
    assert refusal(lambda: pull(worker))[0] == "RESOURCE_EXHAUSTED"


@contextlib.contextmanager
def unread(server, worker):
    """A pull of everything of which only the header and a chunk are read, on a connection of its own."""
    with grpc.insecure_channel(server.addresses[0], options=NARROW) as channel:
        call = ParameterServerServiceStub(channel).PullDiff(iter([worker.pull_request()]))
        next(call), next(call)
        yield
        call.cancel()


def test_where_the_budget_of_images_is_used_up_replies_are_exact():
    with LocalServer(down_mode="topk", down_dense_below=0, image_bytes=5000) as server:
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


def test_without_a_budget_no_reply_is_top_k():
    with LocalServer(down_mode="topk", image_bytes=0) as server:
        w0 = member(server, 1000)
        first = pull(w0)
        assert (first.mode, first.image) == (pb.REPLY_MODE_EXACT, False)
        assert not pull(w0, first).image


def test_a_slow_pull_keeps_no_push_out_and_counts_what_it_occupies():
    """That is one copy of the values, whoever sends it."""
    with LocalServer(down_mode="exact", inflight_bytes=13 * LARGE, compute_threads=1) as server:
        w0, w1 = member(server, LARGE), member(server, LARGE)
        with unread(server, w0):
            assert 4 * LARGE <= metric(server, IN_FLIGHT) < 4.5 * LARGE
            with unread(server, w1):
                assert metric(server, IN_FLIGHT) < 4.5 * LARGE, "they share it"
            index, ones = range(CHUNK), np.ones(CHUNK)
            parts = [chunk_of(index, ones, start=start, length=CHUNK) for start in range(0, LARGE // 4, CHUNK)]
            assert w1.push_chunks(*parts).version == 1
            assert pull(w1).version == 1, "another copy has room beside the first"
        wait_until(lambda: metric(server, IN_FLIGHT) == 0)


def resident(pid):
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


@pytest.mark.parametrize("down_mode", ["topk", "exact"])
def test_pulls_that_are_refused_cost_no_memory_and_leave_no_image(down_mode):
    with LocalServer(down_mode=down_mode, inflight_bytes=6 * LARGE, compute_threads=1) as server:
        w0 = member(server, LARGE)
        pull(w0)
        images = metric(server, IMAGES) if down_mode == "topk" else 0
        with unread(server, w0):  # it is in flight, with a copy of the model
            w0.push(range(10), np.ones(10))  # others do not share its reply
            for _ in range(4):  # what a server needs for its first of anything stays
                is_refused(server)
            before = resident(server.processes[0].pid)
            for _ in range(16):
                is_refused(server)
            assert resident(server.processes[0].pid) < before + ROOM
        assert metric(server, IMAGES) == images
