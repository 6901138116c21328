"""What pulls may cost a server: they are charged before anything is built, and images have a budget."""

import contextlib
import re
import urllib.request
import zlib
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch

from psclient.rpc.local_server import LocalServer
from pscore.model.layout import ModelLayout, TensorSpec
from pscore.wire.messages import layout_to_message
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from tests.system.tools import wait_until

TIMEOUT, CHUNK = 20.0, 250_000
LARGE = 4_000_000
ROOM = 64 << 20
NARROW = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
"""Of a channel with a connection of its own, on which little is sent ahead."""


class Workers:
    """Workers of one server with raw stubs; the first has uploaded zeros."""

    def __init__(self, server, size):
        self.size, self.metrics = size, server.metrics_addresses[0]
        self.channel = grpc.insecure_channel(server.addresses[0])
        self.stub = ParameterServerServiceStub(self.channel)
        self.layout = layout_to_message(ModelLayout((TensorSpec("w", (size,), torch.float32),)))
        self.run_id = ""
        answer = self.join("w0")
        self.run_id, self.generation = answer.run_id, answer.generation
        self.stub.UploadModel(self.upload(), timeout=TIMEOUT)

    def identity(self, name):
        return pb.WorkerIdentity(run_id=self.run_id, worker_id=name, incarnation="1")

    def join(self, name):
        request = pb.JoinRequest(
            identity=self.identity(name), protocol_version=2, method="raw", layout=self.layout, num_shards=1
        )
        return self.stub.Join(request, timeout=TIMEOUT)

    def upload(self):
        yield pb.UploadModelRequest(header=pb.UploadHeader(identity=self.identity("w0"), generation=self.generation))
        crc, starts = 0, range(0, self.size, CHUNK)
        for start in starts:
            values = bytes(4 * min(CHUNK, self.size - start))
            crc = zlib.crc32(values, crc)
            yield pb.UploadModelRequest(
                chunk=pb.Chunk(
                    start=start,
                    length=len(values) // 4,
                    count=len(values) // 4,
                    index_codec=pb.INDEX_CODEC_DENSE,
                    value_codec=pb.VALUE_CODEC_FP32,
                    values=values,
                )
            )
        yield pb.UploadModelRequest(commit=pb.Commit(chunks=len(starts), entries=self.size, crc32=crc))

    def push(self, name, step, entries):
        """Push ones to the first entries; return the answer."""
        header = pb.PushHeader(
            identity=self.identity(name), step=step, generation=self.generation, plan=[pb.Group(length=self.size)]
        )
        parts = [(start, min(entries, start + CHUNK)) for start in range(0, entries, CHUNK)]
        crc = 0

        def messages():
            nonlocal crc
            yield pb.PushSparseRequest(header=header)
            for start, end in parts:
                offsets, values = np.arange(end - start, dtype="<u4").tobytes(), np.ones(end - start, "<f4").tobytes()
                crc = zlib.crc32(values, zlib.crc32(offsets, crc))
                chunk = pb.Chunk(
                    start=start,
                    length=(self.size if end == entries else end) - start,
                    count=end - start,
                    index_codec=pb.INDEX_CODEC_RAW32,
                    value_codec=pb.VALUE_CODEC_FP32,
                    indices=offsets,
                    values=values,
                )
                yield pb.PushSparseRequest(chunks=[chunk])
            yield pb.PushSparseRequest(commit=pb.Commit(chunks=len(parts), entries=entries, crc32=crc))

        return next(self.stub.PushSparse(messages(), timeout=TIMEOUT))

    def pull(self, name, last=None):
        """Pull; return the header, acknowledging an earlier one."""
        request = pb.PullDiffRequest(identity=self.identity(name), generation=self.generation)
        if last is not None:
            request.has_base, request.base_version = True, last.version
            request.acknowledged_reply, request.image = last.reply_number, last.image
        header, *_ = self.stub.PullDiff(iter([request]), timeout=TIMEOUT)
        return header.header

    def is_refused(self, name):
        self.join(name)
        with pytest.raises(grpc.RpcError) as refused:
            self.pull(name)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    def leave(self, name):
        self.stub.Leave(pb.LeaveRequest(identity=self.identity(name)), timeout=TIMEOUT)

    def image_bytes(self):
        return self.metric("psservice_image_bytes")

    def metric(self, name):
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=TIMEOUT) as page:
            found = re.search(rf"^{name} (\S+)$", page.read().decode(), re.MULTILINE)
        return float(found[1])

    @contextlib.contextmanager
    def unread(self, server, name):
        """A pull of everything of which only the header and a chunk are read, on a connection of its own."""
        with grpc.insecure_channel(server.addresses[0], options=NARROW) as channel:
            request = pb.PullDiffRequest(identity=self.identity(name), generation=self.generation)
            call = ParameterServerServiceStub(channel).PullDiff(iter([request]))
            next(call), next(call)
            yield
            call.cancel()


def test_where_the_budget_of_images_is_used_up_replies_are_exact():
    with LocalServer(down_mode="topk", down_dense_below=0, image_bytes=5000) as server:
        workers = Workers(server, 1000)
        first = workers.pull("w0")
        assert (first.mode, first.image) == (pb.REPLY_MODE_EXACT, True)
        held = workers.image_bytes()
        assert 4000 <= held <= 5000
        workers.join("w1")
        assert not workers.pull("w1").image, "one image is all that fits"
        second = workers.pull("w0", first)
        assert second.mode == pb.REPLY_MODE_TOPK
        workers.leave("w0")
        wait_until(lambda: workers.image_bytes() == 0)
        assert workers.pull("w1").image
        assert workers.image_bytes() == held


def test_without_a_budget_no_reply_is_top_k():
    with LocalServer(down_mode="topk", image_bytes=0) as server:
        workers = Workers(server, 1000)
        first = workers.pull("w0")
        assert (first.mode, first.image) == (pb.REPLY_MODE_EXACT, False)
        assert not workers.pull("w0", first).image


def test_a_slow_pull_keeps_no_push_out_and_counts_what_it_occupies():
    """That is one copy of the values, whoever sends it."""
    with LocalServer(down_mode="exact", inflight_bytes=13 * LARGE, compute_threads=1) as server:
        workers = Workers(server, LARGE)
        workers.join("w1")
        with workers.unread(server, "w0"):
            assert 4 * LARGE <= workers.metric("psservice_bytes_in_flight") < 4.5 * LARGE
            with workers.unread(server, "w1"):
                assert workers.metric("psservice_bytes_in_flight") < 4.5 * LARGE, "they share it"
            assert workers.push("w1", 1, LARGE // 4).version == 1
            assert workers.pull("w1").version == 1, "another copy has room beside the first"
        wait_until(lambda: workers.metric("psservice_bytes_in_flight") == 0)


def resident(pid):
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


@pytest.mark.parametrize("down_mode", ["topk", "exact"])
def test_pulls_that_are_refused_cost_no_memory_and_leave_no_image(down_mode):
    with LocalServer(down_mode=down_mode, inflight_bytes=6 * LARGE, compute_threads=1) as server:
        workers = Workers(server, LARGE)
        workers.pull("w0")
        images = workers.image_bytes() if down_mode == "topk" else 0
        with workers.unread(server, "w0"):  # it is in flight, with a copy of the model
            workers.push("w0", 1, 10)  # others do not share its reply
            for number in range(1, 5):  # what a server needs for its first of anything stays
                workers.is_refused(f"w{number}")
            before = resident(server.processes[0].pid)
            for number in range(5, 21):
                workers.is_refused(f"w{number}")
            assert resident(server.processes[0].pid) < before + ROOM
        assert workers.image_bytes() == images
