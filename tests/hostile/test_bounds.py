"""Numbers that are too large: each is refused by name, and nothing that is kept outgrows what can carry it."""

import math
import re
from pathlib import Path

import pytest
import torch
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from psclient.rpc.local_server import LocalServer
from pscore.wire.errors import Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.rpc import bounds
from psservice.rpc.bounds import BOUNDS
from tests.packed import packed
from tests.system.raw import TIMEOUT, RawWorker, chunk_of, commit_of, joined, outcome
from tests.tiers import examples

SERVICE = pb.DESCRIPTOR.services_by_name["ParameterServerService"]
NUMBERS = (
    FieldDescriptor.CPPTYPE_UINT64,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_DOUBLE,
    FieldDescriptor.CPPTYPE_FLOAT,
)
MOST = 2**64 - 1
EVERY_VALUE = {
    ("LeaseSamplesRequest", "seed"),
    ("FollowRunRequest", "known"),
    ("FollowRunRequest", "cut"),
}  # all 64 bits are its bound
SIGNED = {("PushHeader", "loss")}  # below zero too
COMPARED = {  # with what the shard has, or with what has come before: what does not agree is refused by another name
    ("Chunk", "start"),
    ("Chunk", "length"),
    ("Commit", "entries"),
    ("BytesChunk", "offset"),
    ("Group", "start"),
    ("Group", "length"),
    ("SampleRange", "epoch"),
    ("SampleRange", "start"),
    ("SampleRange", "count"),
    ("UploadHeader", "buffer_bytes"),
    ("BuffersHeader", "buffer_bytes"),
}


def numbers(kind: Descriptor, path=()):
    """Yield the path of every 64-bit number of a message, through the messages in it."""
    for field in kind.fields:
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from numbers(field.message_type, (*path, field.name))
        elif field.message_type is None and field.cpp_type in NUMBERS:
            yield (*path, field.name), kind.name, field


ALL = [
    pytest.param(method.name, path, kind, field, id=f"{method.name}-{'.'.join(path)}")
    for method in SERVICE.methods
    for path, kind, field in numbers(method.input_type)
    if (kind, field.name) not in EVERY_VALUE
]


def requests_of(worker, rpc):
    """Return the messages of a call that would do, but for what it is about to be given."""
    identity, generation = worker.identity, worker.generation
    if rpc == "Join":
        layout = packed(pb.ModelLayout(parameters=[pb.TensorSpec(name="w", data_type=pb.DATA_TYPE_FLOAT32)]))
        return [worker.join_request(layout=layout)]
    if rpc == "RenewLease":
        history = pb.ShardHistory(generation=generation, version=1, origins=[pb.ShardOrigin(version=1)])
        return [pb.RenewLeaseRequest(identity=identity, shards=[history])]
    if rpc == "UploadModel":
        header = pb.UploadHeader(identity=identity, generation=generation)
        return [
            pb.UploadModelRequest(header=header),
            pb.UploadModelRequest(chunk=pb.Chunk()),
            pb.UploadModelRequest(buffers=pb.BytesChunk()),
            pb.UploadModelRequest(commit=pb.Commit()),
        ]
    if rpc == "PushSparse":
        chunk = chunk_of([0], [0])
        parts = ({"header": worker.push_header()}, {"chunks": [chunk]}, {"commit": commit_of(chunk)})
        return [pb.PushSparseRequest(**part) for part in parts]
    if rpc == "PullDiff":
        return [worker.pull_request(has_base=True)]
    if rpc == "ExchangeBuffers":
        header = pb.BuffersHeader(identity=identity, generation=generation, step=1, samples=1)
        return [pb.ExchangeBuffersRequest(header=header), pb.ExchangeBuffersRequest(buffers=pb.BytesChunk())]
    if rpc == "LeaseSamples":
        return [pb.LeaseSamplesRequest(identity=identity, dataset="d", size=10, has_epoch=True, samples=1)]
    if rpc == "WaitForAll":
        return [pb.WaitForAllRequest(identity=identity, number=1)]
    if rpc == "Publish":
        return [pb.PublishRequest(identity=identity, generation=generation, version=1)]
    if rpc == "FollowRun":
        return [pb.FollowRunRequest(num_shards=1)]
    if rpc == "AwaitCut":
        return [pb.AwaitCutRequest(known=[pb.ShardVersion()])]
    if rpc == "ReadCut":
        return [pb.ReadCutRequest(version=pb.ShardVersion(generation=generation), held=[pb.HeldPart(end=1)])]
    if rpc == "RestoreModel":
        return [pb.RestoreModelRequest(version=1)]
    if rpc == "EvictWorker":
        return [pb.EvictWorkerRequest(worker_id="nobody")]
    if rpc == "Replicate":
        return [pb.ReplicateRequest(standby="s", successor=pb.ShardHistory(origins=[pb.ShardOrigin()]))]
    raise AssertionError(f"{rpc} has a number now: say what a good request of it is")


def set_at(messages, path, value):
    """Put a value into the message of the list that has it."""
    for message in messages:
        if len(messages) > 1 and path[0] not in {field.name for field, _ in message.ListFields()}:
            continue
        for name in path[:-1]:
            message = getattr(message, name)
            if message.__class__.__name__.startswith("Repeated"):
                message = message[0] if len(message) else message.add()
        if isinstance(getattr(message, path[-1]), int | float):
            setattr(message, path[-1], value)
        else:
            getattr(message, path[-1]).append(value)
        return
    raise AssertionError(f"no message has {path}")


def called(worker, rpc, messages):
    """Return status, reason and words of a refusal, or ``None``."""
    in_parts = SERVICE.methods_by_name[rpc].client_streaming
    return outcome(lambda: getattr(worker.stub, rpc)(iter(messages) if in_parts else messages[0], timeout=TIMEOUT))


@pytest.mark.parametrize(("rpc", "path", "kind", "field"), ALL)
def test_every_number_of_every_request_has_a_bound_and_is_refused_beyond_it(worker, rpc, path, kind, field):
    is_double = field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
    low = -1e300 if (kind, field.name) in SIGNED else -1.0
    for value in (math.inf, math.nan, low, 1e300) if is_double else (MOST,):
        messages = requests_of(worker, rpc)
        set_at(messages, path, value)
        found = called(worker, rpc, messages)
        assert found is not None, f"{kind}.{field.name} = {value} was taken"
        if (kind, field.name) in COMPARED:
            assert found[1] is not None, found
        else:
            assert found[:2] == ("INVALID_ARGUMENT", "BAD_REQUEST"), found
            assert field.name in found[2]
    worker.pull()
    worker.push([3], [0.5])


def push_header(worker, **fields):
    messages = requests_of(worker, "PushSparse")
    for name, value in fields.items():
        setattr(messages[0].header, name, value)
    return called(worker, "PushSparse", messages)


def test_samples_beyond_their_bound_are_not_kept_and_the_run_is_restored(tmp_path):
    with LocalServer(data_dir=tmp_path, run_id="r") as running:
        worker = joined(running.addresses[0])
        for samples in (2**63, MOST):
            found = push_header(worker, samples=samples)
            assert found is not None
            assert found[1] == "BAD_REQUEST"
        worker.push([1], [1.0])
        assert worker.stub.TakeSnapshot(pb.TakeSnapshotRequest(), timeout=TIMEOUT).version == 1
        running.processes[0].kill()
        running.restart()
        status = worker.stub.GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT, wait_for_ready=True)
        assert (status.version, status.samples) == (1, 1)


def test_a_generation_beyond_its_bound_is_refused_and_later_workers_join(tmp_path):
    with LocalServer() as running:
        raw = RawWorker(running.addresses[0], "liar")
        found = called(raw, "Join", [raw.join_request(generation_seen=MOST)])
        assert found is not None
        assert found[1] == "BAD_REQUEST"
        assert "generation_seen" in found[2]
        later = joined(running.addresses[0])
        later.push([1], [1.0])


def test_an_upload_cannot_begin_at_a_version_from_which_counting_on_would_overflow():
    with LocalServer() as running:
        first = RawWorker(running.addresses[0], "first")
        answer = first.stub.Join(first.join_request(), timeout=TIMEOUT)
        first.identity.run_id, first.generation = answer.run_id, answer.generation
        for version in (MOST - 1, 2**63):
            header = pb.UploadHeader(identity=first.identity, generation=first.generation, version=version)
            found = called(first, "UploadModel", [pb.UploadModelRequest(header=header)])
            assert found is not None
            assert found[1] == "BAD_REQUEST", found
        first.upload()
        later = joined(running.addresses[0])
        assert later.push([1], [1.0]).version == 1


def test_a_wagma_step_far_ahead_is_refused_and_later_workers_join():
    settings = {"update": "average", "group_size": "2", "tau": "10", "late": "replace"}
    with LocalServer() as running:
        workers = []
        for name in ("liar", "later"):
            raw = RawWorker(running.addresses[0], name)
            raw.join(method_settings=settings)
            for step in (MOST, 2**53) if name == "liar" else ():
                found = push_header(raw, step=step)
                assert found is not None
                assert found[1] == "BAD_REQUEST", found
            workers.append(raw)
        answer = workers[1].join(method_settings=settings)
        assert 1 <= answer.first_step < 2**52


def test_counts_that_add_up_stop_where_no_more_can_be_kept(tmp_path):
    """A server of before may have written more down than is taken now: it must come back all the same."""
    from tests.psservice.service_makers import F32, layout_of
    from tests.psservice.shard_makers import join, open_shards, push, serving

    layout = layout_of((8, F32))
    with serving(layout, torch.zeros(8), data_dir=tmp_path) as shard:
        join(shard, layout)
        push(shard, 1, {0: 1.0}, samples=2**63)
        push(shard, 2, {0: 1.0}, base=1, samples=MOST)
        assert shard.durability.take() is not None
        push(shard, 3, {0: 1.0}, base=2, samples=2**63)
    with open_shards(data_dir=tmp_path) as (again,):
        assert again.model.version == 3
        assert again.run.samples == 2**63 - 1


def test_the_protocols_page_has_every_bound():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "protocol.md").read_text()
    told = {
        (kind, field): (number(least), number(most))
        for kind, field, least, most in re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.+) \| (.+) \|$", page, re.MULTILINE)
    }
    assert told == {(kind, field): bound for kind, fields in BOUNDS.items() for field, bound in fields.items()}


def number(text):
    """Read a number as the page writes it."""
    text, less, _ = text.partition(" − 1")
    factor, times, power = text.rpartition("·")
    base, is_power, exponent = power.replace(",", "").partition("^")
    found = int(base) ** int(exponent) if is_power else int(base)
    return found * (int(factor) if times else 1) - bool(less)


@given(fields=st.integers(0, 3 * 8192), cut=st.integers(0, 3), kind=st.sampled_from(["map", "varint", "fixed"]))
@settings(deadline=None, max_examples=examples(50))
def test_a_message_of_too_many_fields_is_refused_before_it_is_parsed(fields, cut, kind):
    field = {"map": b"\x22\x04\x0a\x02ab", "varint": b"\x30\x81\x01", "fixed": b"\x51" + bytes(8)}[kind]
    raw = field * fields
    raw = raw[: len(raw) - cut]
    if fields > 8193:
        with pytest.raises(Rejected, match="fields"):
            bounds.require_few_fields(pb.JoinRequest, raw)
    elif fields <= 8192:
        bounds.require_few_fields(pb.JoinRequest, raw)
