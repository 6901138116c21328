"""A follower takes no cut that its server has forged or damaged: its module has a true version, or none."""

import hashlib
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
import torch

import psclient
from psclient.settings import ClientSettings
from pscore.model.digest import ModelDigest
from pscore.model.layout import Span, layout_of
from pscore.model.sparse_slice import SparseSlice
from pscore.wire import frames
from pscore.wire.codecs import residue
from pscore.wire.layouts import pack_layout
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


def digest_of(values, layout=LAYOUT):
    digest = ModelDigest(layout)
    digest.add(SparseSlice(SPAN, None, values.float()))
    return digest.value


def cut_of(version, values, layout=LAYOUT, **fields):
    packed = BUFFERS.numpy().tobytes()
    shard = pb.ShardVersion(generation=1, version=version, digest=digest_of(values, layout))
    cut = pb.Cut(run_id="r", shards=[shard], buffers_digest=hashlib.blake2b(packed, digest_size=16).digest())
    for name, value in fields.items():
        setattr(cut.shards[0] if name in ("digest", "generation") else cut, name, value)
    return pb.AwaitCutResponse(cut=cut, layout=pack_layout(LAYOUT), newest_version=version)


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


NARROW = LAYOUT.viewed_in(torch.bfloat16)
BEFORE = VALUES.bfloat16()
PLACES = torch.arange(10) + torch.tensor([0] * 5 + [1] * 5)
AFTER = (BEFORE.view(torch.int16) + torch.zeros(12, dtype=torch.int16).index_fill(0, PLACES, 1)).view(torch.bfloat16)


def words(values):
    return values.view(torch.uint16).numpy()


RESIDUES = residue.encode(words(AFTER[PLACES]), np.ones(10, np.uint16))


def residues(values=RESIDUES, *, offsets=PLACES, **fields):
    """Return a reply of residues for a reader that has ``BEFORE``."""
    segment = SparseSlice(SPAN, offsets, BEFORE[: offsets.numel()])
    chunk = next(frames.encode(segment, chunk_bytes=1 << 20)).chunk
    chunk.MergeFrom(pb.Chunk(**{"value_codec": pb.VALUE_CODEC_RESIDUE, "values": values} | fields))
    checksum = frames.Checksum()
    checksum.add(chunk)
    messages = reply(3, VALUES)
    return [*messages[:2], pb.ReadCutResponse(chunks=[chunk]), pb.ReadCutResponse(commit=checksum.commit())]


def with_bits(bits, escapes=0, where=0):
    return struct.pack("<BII", bits, escapes, where) + RESIDUES[9:]


INFINITE = struct.pack("<B10H", 16, 0x7F80, *[0] * 9)
RESIDUE_REPLIES = {
    "residues of no bits": residues(with_bits(0)),
    "residues of one bit": residues(with_bits(1)),
    "residues of too many bits": residues(with_bits(11)),
    "residues of 64 bits": residues(with_bits(64)),
    "more escapes than entries": residues(with_bits(2, 11, 1)),
    "escapes of gigabytes": residues(with_bits(2, 2**32 - 1, 2**32 - 1)),
    "escapes without places": residues(with_bits(2, 1)),
    "no residues": residues(b"\0"),
    "truncated residues": residues(RESIDUES[:-1]),
    "residues and more": residues(RESIDUES + b"\0"),
    "escapes in escapes without an end": residues(struct.pack("<BII", 2, 10, 1) + b"\0" + with_bits(2, 10, 1)),
    "residues that lead elsewhere": residues(RESIDUES[:-1] + bytes([RESIDUES[-1] ^ 1])),
    "residues of a value that is infinite": residues(INFINITE),
    "residues at other places": residues(offsets=torch.arange(10)),
    "residues beyond the model": residues(start=9),
    "more entries than residues": residues(count=4096),
    "residues of gigabytes": residues(count=2**32 - 1, length=2**32 - 1),
    "words under the name of residues": residues(words(AFTER[PLACES]).tobytes()),
    "residues under the name of words": residues(value_codec=pb.VALUE_CODEC_BF16),
}


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
    "no cut": pb.AwaitCutResponse(layout=pack_layout(LAYOUT)),
    "no shards": pb.AwaitCutResponse(cut=pb.Cut(run_id="r"), layout=pack_layout(LAYOUT)),
    "a short digest": cut_of(2, VALUES, digest=bytes(15)),
    "a digest of other values": cut_of(2, VALUES + 1),
    "a layout with another fingerprint": pb.AwaitCutResponse(
        cut=cut_of(2, VALUES).cut, layout=pb.PackedLayout(pieces=pack_layout(LAYOUT).pieces)
    ),
    "no layout": pb.AwaitCutResponse(cut=cut_of(2, VALUES).cut),
}


class Liar:
    """A server that answers from two lists, and then truly."""

    def __init__(self):
        self.cuts, self.replies, self.asked = [], [], []
        self.newest = cut_of(2, VALUES)
        self.truth = reply(2, VALUES)
        self._lock = threading.Lock()

    def await_cut(self, request, context):
        with self._lock:
            self.asked.append(request)
            if self.cuts:
                return self.cuts.pop(0)
        return self.newest

    def read_cut(self, request, context):
        with self._lock:
            messages = self.replies.pop(0) if self.replies else self.truth
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


@pytest.mark.parametrize("lie", RESIDUE_REPLIES)
def test_false_residues_are_not_written(liar, lie):
    liar.newest, liar.truth = cut_of(2, BEFORE, NARROW), reply(2, BEFORE)
    module, seen = make_module().bfloat16(), []
    settings = ClientSettings(server="local", deadline_seconds=3)

    def note(cut):
        values = flat(module)
        seen.append((cut.version, torch.equal(values, BEFORE), torch.equal(values, AFTER)))
        if cut.version == 2:
            liar.replies.append(RESIDUE_REPLIES[lie])
            liar.newest, liar.truth = cut_of(3, AFTER, NARROW), residues()

    with psclient.follow(liar.address, module, settings=settings, on_cut=note) as follower:
        follower.wait_for(3, SECONDS)
        wait_until(lambda: len(seen) == 2, SECONDS)
    assert seen == [(2, True, False), (3, False, True)]
    assert not liar.replies


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
