"""A worker takes no reply that its server has damaged or cut: each ends in an error of ours, and nothing is applied."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch

from psclient.errors import ServerFaultError, SparsepsError
from psclient.rpc.channel import Connection, RetryPolicy
from psclient.rpc.shard_stream import PulledReply, ShardStream
from psclient.settings import ClientSettings
from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.net.channels import Security
from pscore.wire import frames
from pscore.wire.v1 import parameter_server_pb2 as pb

SPAN = Span(0, 64)
IDENTITY = pb.WorkerIdentity(worker_id="w", incarnation="i", run_id="r")


def reply(*, mode=pb.REPLY_MODE_EXACT, span=SPAN):
    """Return the messages of a true reply: header, one chunk, commit."""
    form, checksum = frames.WireForm(), frames.Checksum()
    values = SparseSlice(span, torch.tensor([1, 5, 9]), torch.tensor([1.0, 2.0, 3.0]))
    (encoded,) = frames.encode(values, form, chunk_bytes=1 << 20)
    checksum.add(encoded.chunk)
    return [
        pb.PullDiffResponse(header=pb.PullHeader(mode=mode, version=1, reply_number=1)),
        pb.PullDiffResponse(chunks=[encoded.chunk]),
        pb.PullDiffResponse(commit=checksum.commit()),
    ]


def changed(position, **fields):
    messages = reply()
    chunk = messages[position].chunks[0]
    for name, value in fields.items():
        setattr(chunk, name, value)
    return messages


def miscounted():
    messages = reply()
    messages[2].commit.chunks += 1
    return messages


LIES = {
    "no header": reply()[1:],
    "a second header": [reply()[0], *reply()],
    "a second header, another mode": [reply()[0], *reply(mode=pb.REPLY_MODE_TOPK)],
    "no mode": reply(mode=pb.REPLY_MODE_UNSPECIFIED),
    "an unknown mode": reply(mode=77),
    "an empty message first": [pb.PullDiffResponse(), *reply()],
    "a chunk of elsewhere": reply(span=Span(64, 64)),
    "too many entries": changed(1, count=65),
    "a cut payload": changed(1, values=b"\0"),
    "an unknown codec": changed(1, index_codec=99),
    "a chunk twice": [*reply()[:2], *reply()[1:]],
    "a commit of more": miscounted(),
    "no message of ours": [b"\xff" * 40],
    "a cut message": [reply()[1].SerializeToString()[:-1]],
}


@pytest.fixture
def ask():
    """Return a function that pulls once from a server which answers with given messages."""
    script = []

    def serve(requests, context):
        for _ in requests:
            yield from script

    handler = grpc.stream_stream_rpc_method_handler(serve)
    service = pb.DESCRIPTOR.services_by_name["ParameterServerService"].full_name
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {"PullDiff": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    shard = ShardStream(Connection(f"127.0.0.1:{port}", Security()), 0, SPAN, ClientSettings())

    def pulled(messages):
        script[:] = [each if isinstance(each, bytes) else each.SerializeToString() for each in messages]
        return shard.pull(IDENTITY, RetryPolicy(5.0, 5.0))

    yield pulled
    shard.close()
    server.stop(0).wait()


def test_a_true_reply_is_taken(ask):
    (segment,) = ask(reply()).segments
    assert (segment.span.start + segment.offsets).tolist() == [1, 5, 9]
    assert segment.values.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("lie", LIES)
def test_a_false_reply_is_refused(ask, lie):
    with pytest.raises(SparsepsError):
        ask(LIES[lie])
    assert isinstance(ask(reply()), PulledReply)  # the next one is read from its beginning


def test_a_second_header_cannot_change_how_entries_are_applied(ask):
    with pytest.raises(ServerFaultError, match="second header"):
        ask(LIES["a second header, another mode"])
