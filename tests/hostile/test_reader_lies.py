"""A follower takes no cut that its server has forged or damaged: its module has a true version, or none."""

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch

import psclient
from psclient.settings import ClientSettings
from pscore.model.digest import ModelDigest
from pscore.model.layout import Span, layout_of
from pscore.model.sparse_slice import SparseSlice
from pscore.wire import frames
from pscore.wire.messages import layout_to_message
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.system.tools import wait_until

SECONDS = 30.0
SERVICE = pb.DESCRIPTOR.services_by_name["ParameterServerService"].full_name
VALUES = torch.arange(12.0)


def make_module():
    module = torch.nn.Linear(3, 3)
    module.register_buffer("mean", torch.zeros(2))
    return module


MODULE = make_module()
LAYOUT = layout_of(MODULE.named_parameters(), MODULE.named_buffers())
SPAN = Span(0, LAYOUT.size)
BUFFERS = torch.tensor([4.0, 5.0])


def digest_of(values):
    digest = ModelDigest(LAYOUT)
    digest.add(SparseSlice(SPAN, None, values))
    return digest.value


def cut_of(version, values, **fields):
    packed = BUFFERS.numpy().tobytes()
    shard = pb.ShardVersion(generation=1, version=version, digest=digest_of(values))
    cut = pb.Cut(run_id="r", shards=[shard], buffers_digest=hashlib.blake2b(packed, digest_size=16).digest())
    for name, value in fields.items():
        setattr(cut.shards[0] if name in ("digest", "generation") else cut, name, value)
    return pb.AwaitCutResponse(cut=cut, layout=layout_to_message(LAYOUT), newest_version=version)


def reply(version, values, *, span=SPAN, cuts_at=None, offsets=None):
    checksum, chunks = frames.Checksum(), []
    segment = SparseSlice(span, offsets, values if offsets is None else values[offsets])
    for encoded in frames.encode(segment, chunk_bytes=64 if cuts_at is None else 1 << 20):
        checksum.add(encoded.chunk)
        chunks.append(encoded.chunk)
    packed = BUFFERS.numpy().tobytes()
    return [
        pb.ReadCutResponse(header=pb.CutHeader(version=version, buffer_bytes=len(packed))),
        pb.ReadCutResponse(buffers=pb.BytesChunk(data=packed)),
        pb.ReadCutResponse(chunks=chunks),
        pb.ReadCutResponse(commit=checksum.commit()),
    ]


def without(*positions):
    return [message for number, message in enumerate(reply(2, VALUES)) if number not in positions]


def with_header(**fields):
    messages = reply(2, VALUES)
    for name, value in fields.items():
        setattr(messages[0].header, name, value)
    return messages


def with_commit(**fields):
    messages = reply(2, VALUES)
    for name, value in fields.items():
        setattr(messages[3].commit, name, value)
    return messages


def with_values(place, value):
    changed = VALUES.clone()
    changed[place] = value
    return reply(2, changed)


def with_buffers(data):
    messages = reply(2, VALUES)
    messages[1].buffers.data = data
    return messages


REPLIES = {
    "nothing": [],
    "no header": without(0),
    "two headers": [reply(2, VALUES)[0], *reply(2, VALUES)],
    "another version": with_header(version=3),
    "no commit": without(3),
    "a commit of other bytes": with_commit(crc32=1),
    "a commit of more chunks": with_commit(chunks=1000),
    "no values": [*without(2, 3), pb.ReadCutResponse(commit=pb.Commit())],
    "values that are not the cut's": with_values(5, 7.5),
    "not all values": reply(2, VALUES[:8], span=Span(0, 8)),
    "some values alone": reply(2, VALUES, offsets=torch.tensor([1, 4])),
    "values beyond the model": reply(2, torch.arange(13.0), span=Span(0, 13)),
    "a value that is no number": with_values(3, float("nan")),
    "buffers of a wrong length": with_header(buffer_bytes=1 << 40),
    "other buffers": with_buffers(bytes(8)),
    "too many bytes of buffers": with_buffers(bytes(80)),
    "no message of ours": [b"\xff" * 50],
}
CUTS = {
    "no cut": pb.AwaitCutResponse(layout=layout_to_message(LAYOUT)),
    "no shards": pb.AwaitCutResponse(cut=pb.Cut(run_id="r"), layout=layout_to_message(LAYOUT)),
    "a short digest": cut_of(2, VALUES, digest=bytes(15)),
    "a digest of other values": cut_of(2, VALUES + 1),
    "a layout with another fingerprint": pb.AwaitCutResponse(
        cut=cut_of(2, VALUES).cut, layout=pb.ModelLayout(parameters=layout_to_message(LAYOUT).parameters)
    ),
    "no layout": pb.AwaitCutResponse(cut=cut_of(2, VALUES).cut),
}


class Liar:
    """A server that answers from two lists, and then truly."""

    def __init__(self):
        self.cuts, self.replies, self.asked = [], [], []
        self._lock = threading.Lock()

    def await_cut(self, request, context):
        with self._lock:
            self.asked.append(request)
            if self.cuts:
                return self.cuts.pop(0)
        return cut_of(2, VALUES)

    def read_cut(self, request, context):
        with self._lock:
            messages = self.replies.pop(0) if self.replies else reply(2, VALUES)
        for message in messages:
            yield message if isinstance(message, bytes) else message.SerializeToString()


@pytest.fixture
def liar():
    liar = Liar()
    handlers = {
        "AwaitCut": grpc.unary_unary_rpc_method_handler(
            liar.await_cut, pb.AwaitCutRequest.FromString, pb.AwaitCutResponse.SerializeToString
        ),
        "ReadCut": grpc.unary_stream_rpc_method_handler(liar.read_cut, pb.ReadCutRequest.FromString),
        "GetStatus": grpc.unary_unary_rpc_method_handler(
            lambda request, context: pb.GetStatusResponse(num_shards=1),
            pb.GetStatusRequest.FromString,
            pb.GetStatusResponse.SerializeToString,
        ),
    }
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    liar.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield liar
    server.stop(0).wait()


def flat(module):
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def follow_until_true(liar):
    """Follow; a true version must be there in the end, and nothing else was committed before."""
    module, seen = make_module(), []
    settings = ClientSettings(server="local", deadline_seconds=3)

    def note(cut):
        seen.append((cut.version, torch.equal(flat(module), VALUES)))

    with psclient.follow(liar.address, module, settings=settings, on_cut=note) as follower:
        wait_until(lambda: bool(seen), SECONDS)
        follower.wait_for(2, SECONDS)
        assert seen == [(2, True)]
        assert torch.equal(module.mean, BUFFERS)


@pytest.mark.parametrize("lie", REPLIES)
def test_a_false_reply_is_not_written(liar, lie):
    liar.replies.append(REPLIES[lie])
    follow_until_true(liar)


@pytest.mark.parametrize("lie", CUTS)
def test_a_false_cut_is_not_followed(liar, lie):
    liar.cuts.append(CUTS[lie])
    follow_until_true(liar)


def test_a_cut_of_several_shards_from_one_server_is_told_with_what_to_do(liar):
    cut = cut_of(2, VALUES)
    cut.cut.shards.append(cut.cut.shards[0])
    liar.cuts += [cut] * 100
    with psclient.follow(liar.address, make_module()) as follower:
        wait_until(lambda: follower.error is not None, SECONDS)
        with pytest.raises(psclient.errors.FollowerNotReadyError, match="2 shards, and 1 address"):
            follower.wait_for(0, 0.0)
