"""The whole service without a network, called with nearly right messages: refused in the protocol's words, or obeyed.

``python -m tests.hostile.service --inputs 100000`` is the long run.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import torch
from google.protobuf.message import DecodeError, Message

from pscore.model.layout import ModelLayout, Span, TensorSpec
from pscore.model.sparse_slice import SparseSlice
from pscore.wire import frames
from pscore.wire.errors import Rejected
from pscore.wire.layouts import pack_layout
from pscore.wire.messages import type_to_message
from pscore.wire.protocol import NEWEST_PROTOCOL
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.awaiting import NotYetError
from psservice.observability.metrics import Metrics
from psservice.rpc.auth import ANONYMOUS_ADMIN
from psservice.rpc.calls import RULES, Call, check, handlers_of
from psservice.rpc.operators import OperatorCalls
from psservice.rpc.readers import ReaderCalls
from psservice.rpc.shards import ShardCalls
from psservice.rpc.standbys import StandbyCalls
from psservice.rpc.workers import WorkerCalls
from psservice.settings import ServerSettings
from psservice.shard.lifecycle import open_shard
from psservice.shard.shard import Shard
from psservice.state.run import RunState
from psservice.values import Identity
from tests.hostile.mutation import good_chunks, mutate, mutate_bytes

SERVICE = pb.DESCRIPTOR.services_by_name["ParameterServerService"]
LAYOUT = ModelLayout(
    (TensorSpec("weight", (40, 50), torch.float32), TensorSpec("half", (500,), torch.bfloat16)),
    (TensorSpec("mean", (3,), torch.float32), TensorSpec("count", (), torch.int64)),
)
FEED = ModelLayout((TensorSpec("half", (2000,), torch.bfloat16), TensorSpec("wide", (125,), torch.int64)), word_bytes=2)
MOST_ANSWERS = 100


class Ended(Exception):  # noqa: N818 - what gRPC raises to end a call
    """A call was ended with a status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        """Keep the status."""
        super().__init__(f"{code.name}: {details}")
        self.code = code


def called(shard: Shard, handler: Any, rpc: str, request: Any) -> list[Any]:
    """Call a handler without a network, as the dispatcher does; return its answers.

    Raises:
        Ended: it was refused, or failed.
    """
    call = Call(rpc, ANONYMOUS_ADMIN)
    try:
        with shard.drain_gate if RULES[rpc].changes else nullcontext():
            if isinstance(request, list):
                answer = _read(shard, handler(call), call, request)
            else:
                check(call, request)
                try:
                    answer = handler(call, request)
                except NotYetError:
                    call.is_late = True
                    answer = handler(call, request)
            if isinstance(answer, Message):
                return [answer]
            return [message for message, _ in zip(answer, range(MOST_ANSWERS), strict=False)]
    except Rejected as refusal:
        raise Ended(grpc.StatusCode[refusal.reason.status_name], str(refusal)) from refusal
    except Exception as error:
        raise Ended(grpc.StatusCode.INTERNAL, repr(error)) from error


def _read(shard: Shard, reading: Any, call: Call, requests: list[Any]) -> Any:
    """Send a stream into a reader until it ends, take the last step, and keep the stream as the handler asks for."""
    next(reading)
    try:
        for request in requests:
            check(call, request)
            if call.raw is not None:
                call.raw.append(request.SerializeToString())
            reading.send(request)
        reading.send(None)
    except StopIteration as end:
        return shard.apply_thread.run(end.value) if callable(end.value) else end.value
    finally:
        call.release()
    raise AssertionError("a reader must end where its stream ends")


class Service:
    """A server's handlers over one engine with a model and a worker, and the messages that it would obey."""

    def __init__(self, layout: ModelLayout = LAYOUT, **settings: object) -> None:
        """Join and upload; with a layout of words, as the publisher of a feed."""
        self.layout = layout
        values = {"lease_seconds": 3600.0, "run_id": "fuzz", **settings}
        self.engine = open_shard(ServerSettings.model_validate(values), torch.device("cpu"), Metrics())
        operators = OperatorCalls(self.engine, lambda: 0, lambda: None, lambda: None)
        shard = self.engine
        calls = (WorkerCalls(shard), ReaderCalls(shard), ShardCalls(shard), StandbyCalls(shard), operators)
        self.handlers = {rpc: handler for each in calls for rpc, handler in handlers_of(each).items()}
        self.identity = pb.WorkerIdentity(run_id="fuzz", worker_id="anna", incarnation="1")
        self.step = 0
        self.span, self.buffers = Span(0, layout.size), b"" if layout.word_bytes else bytes(20)
        join = self.call("Join", [self.join()])[0]
        self.generation = join.generation
        values_ = torch.randn(layout.size, generator=torch.Generator().manual_seed(1)).to(layout.value_dtype)
        upload = [pb.UploadModelRequest(header=self.upload_header(join.generation))]
        checksum = frames.Checksum()
        for chunk, _ in frames.encode(SparseSlice(self.span, None, values_), chunk_bytes=1 << 20):
            checksum.add(chunk)
            upload.append(pb.UploadModelRequest(chunk=chunk))
        if self.buffers:
            upload.append(pb.UploadModelRequest(buffers=pb.BytesChunk(data=self.buffers)))
        upload.append(pb.UploadModelRequest(commit=checksum.commit()))
        self.upload = upload
        self.call("UploadModel", upload)

    def join(self) -> pb.JoinRequest:
        """Return a request to join."""
        return pb.JoinRequest(
            identity=self.identity,
            protocol_version=NEWEST_PROTOCOL,
            method="dgs",
            method_settings={"update": "assign"} if self.layout.word_bytes else {"momentum": "0.7"},
            layout=pack_layout(self.layout),
            num_shards=1,
        )

    def upload_header(self, generation: int) -> pb.UploadHeader:
        """Return the header of an upload."""
        return pb.UploadHeader(identity=self.identity, generation=generation, buffer_bytes=len(self.buffers))

    def push(self, chance: random.Random) -> list[pb.PushSparseRequest]:
        """Return a push that would be applied."""
        self.step += 1
        count = chance.randrange(1, 60)
        offsets = torch.tensor(sorted(chance.sample(range(self.layout.size), count)))
        values = torch.tensor([chance.gauss(0, 1) for _ in range(count)]).to(self.layout.value_dtype)
        header = pb.PushHeader(
            identity=self.identity,
            step=self.step,
            generation=self.generation,
            base_version=self.engine.require_model(None).version if self.layout.word_bytes else 0,
            samples=1,
            loss=chance.gauss(0, 1),
            plan=[pb.Group(start=0, length=self.layout.size)],
            finished=[pb.FinishedSamples(dataset="train", ranges=[pb.SampleRange(start=7 * self.step, count=9)])],
        )
        messages, checksum = [pb.PushSparseRequest(header=header)], frames.Checksum()
        for chunk, _ in frames.encode(
            SparseSlice(self.span, offsets, values), chunk_bytes=chance.choice((128, 1 << 20))
        ):
            checksum.add(chunk)
            messages.append(pb.PushSparseRequest(chunks=[chunk]))
        return [*messages, pb.PushSparseRequest(commit=checksum.commit())]

    def read_cut(self, chance: random.Random) -> pb.ReadCutRequest:
        """Return a question for the values of a cut that there is, if one can be made."""
        dtype = chance.choice((None, torch.bfloat16))
        self.engine.cuts.ask(dtype)
        self.engine.cuts.make_if_due()
        cut, middle = self.engine.cuts.newest, chance.randrange(1, self.layout.size)
        found = cut.shards[dtype][0] if cut is not None and dtype in cut.shards else None
        return pb.ReadCutRequest(
            reader_type=type_to_message(dtype),
            residues=chance.random() < 0.5,
            version=pb.ShardVersion(**found._asdict()) if found else None,
            held=[
                pb.HeldPart(end=middle, has_version=True, version=chance.randrange(self.step + 1)),
                pb.HeldPart(end=self.layout.size),
            ],
        )

    def good(self, rpc: str, chance: random.Random) -> list[Message]:
        """Return the messages of a call that would be obeyed, or at least understood."""
        identity = self.identity
        pull = pb.PullDiffRequest(identity=identity, generation=self.generation, has_base=True)
        buffers = pb.BuffersHeader(
            identity=identity, generation=self.generation, step=self.step, samples=1, buffer_bytes=20
        )
        calls: dict[str, Callable[[], list[Message]]] = {
            "Join": lambda: [self.join()],
            "RenewLease": lambda: [pb.RenewLeaseRequest(identity=identity)],
            "Leave": lambda: [
                pb.LeaveRequest(identity=pb.WorkerIdentity(run_id="fuzz", worker_id="b", incarnation="2"))
            ],
            "UploadModel": lambda: list(self.upload),
            "DownloadModel": lambda: [pb.DownloadModelRequest()],
            "PushSparse": lambda: list(self.push(chance)),
            "PullDiff": lambda: [pull],
            "ExchangeBuffers": lambda: [
                pb.ExchangeBuffersRequest(header=buffers),
                pb.ExchangeBuffersRequest(buffers=pb.BytesChunk(data=bytes(20))),
            ],
            "WaitForAll": lambda: [pb.WaitForAllRequest(identity=identity, number=chance.randrange(1, 4))],
            "Publish": lambda: [
                pb.PublishRequest(identity=identity, generation=self.generation, version=self.next_version(chance))
            ],
            "LeaseSamples": lambda: [
                pb.LeaseSamplesRequest(
                    identity=identity,
                    dataset="train",
                    size=1000,
                    has_epoch=True,
                    epoch=chance.randrange(3),
                    samples=chance.randrange(100),
                    held=[pb.SampleRange(start=chance.randrange(900), count=chance.randrange(1, 100))],
                )
            ],
            "AwaitCut": lambda: [
                pb.AwaitCutRequest(
                    reader="r",
                    known=[pb.ShardVersion(version=chance.randrange(3))],
                    reader_type=chance.choice((pb.DATA_TYPE_UNSPECIFIED, pb.DATA_TYPE_FLOAT16, pb.DATA_TYPE_BFLOAT16)),
                )
            ],
            "ReadCut": lambda: [self.read_cut(chance)],
            "FollowRun": lambda: [
                pb.FollowRunRequest(
                    num_shards=1, known=chance.randrange(3), progress=pb.ShardProgress(shard_index=chance.randrange(3))
                )
            ],
            "GetStatus": lambda: [pb.GetStatusRequest()],
            "FinishRun": lambda: [pb.FinishRunRequest(run_id="another")],
            "TakeSnapshot": lambda: [pb.TakeSnapshotRequest(checkpoint="c")],
            "ListCheckpoints": lambda: [pb.ListCheckpointsRequest()],
            "PinCheckpoint": lambda: [pb.PinCheckpointRequest(checkpoint="c")],
            "ReadCheckpoint": lambda: [pb.ReadCheckpointRequest(checkpoint="c")],
            "DeleteCheckpoint": lambda: [pb.DeleteCheckpointRequest(checkpoint="c")],
            "RestoreModel": lambda: [pb.RestoreModelRequest(version=1 << 60)],
            "Drain": lambda: [pb.DrainRequest(action=pb.DRAIN_ACTION_OPEN)],
            "EvictWorker": lambda: [pb.EvictWorkerRequest(worker_id="bert", ban_seconds=1.0)],
            "Replicate": lambda: [
                pb.ReplicateRequest(
                    standby="s",
                    segment=chance.randrange(3),
                    mark=chance.choice((b"", bytes(8))),
                    offset=chance.choice((0, 36, 1 << 40)),
                    generation=chance.randrange(2),
                )
            ],
            "Promote": lambda: [pb.PromoteRequest(force=True)],
        }
        return calls[rpc]()

    def next_version(self, chance: random.Random) -> int:
        """Return the version of a feed that can be published, mostly, or any other."""
        return self.engine.require_model(None).version + chance.choice((0, 1, 1, 1, 2)) or 1

    def call(self, rpc: str, requests: list[Any]) -> list[Any]:
        """Make a call; raises :class:`Ended` where it is refused."""
        return called(self.engine, self.handlers[rpc], rpc, requests if RULES[rpc].in_parts else requests[0])

    @property
    def usable(self) -> bool:
        """False where a good push would be refused from now on."""
        known = Identity(self.identity.worker_id, self.identity.incarnation)
        self.step = max(self.step, self.engine.state.pushes.find(known).step)
        live = self.engine.leases.is_live(known)
        open_ = not self.engine.drain_gate.is_closed and not self.engine.leases.evicted()
        return live and open_ and self.step < 1 << 62 and self.engine.run.state is RunState.TRAINING

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close()


def changed(rpc: str, requests: list[Any], others: list[pb.Chunk], chance: random.Random) -> list[Any]:
    """Return the messages of a call with something wrong."""
    new = list(requests)
    kind = type(new[0])
    for _ in range(chance.choice((1, 1, 2, 3))):
        if not new:
            break
        place = chance.randrange(len(new))
        how = chance.randrange(10)
        if how == 0 and len(new) > 1:
            del new[place]
        elif how == 1:
            new.insert(place, new[chance.randrange(len(new))])
        elif how == 2 and len(new) > 1:
            chance.shuffle(new)
        elif how < 6 and kind is pb.PushSparseRequest and new[place].chunks:
            new[place] = pb.PushSparseRequest(chunks=[mutate(new[place].chunks[0], others, chance)])
        else:
            try:
                new[place] = kind.FromString(mutate_bytes(new[place].SerializeToString(), chance))
            except DecodeError:
                continue
    if kind is pb.PushSparseRequest and chance.random() < 0.5:
        checksum = frames.Checksum()
        for request in new:
            for chunk in request.chunks:
                checksum.add(chunk)
        new = [
            pb.PushSparseRequest(commit=checksum.commit()) if request.HasField("commit") else request for request in new
        ]
    return new if RULES[rpc].in_parts else new[:1] or requests[:1]


def campaign(inputs: int, seed: int, layout: ModelLayout = LAYOUT, **settings: object) -> Counter[str]:
    """Make so many calls to a run with a layout; return how many ended how.

    Raises:
        AssertionError: one ended with an internal error, or changed what it must not.
    """
    chance = random.Random(seed)
    others = good_chunks()
    outcomes: Counter[str] = Counter()
    rpcs = [method.name for method in SERVICE.methods] + 12 * ["PushSparse"]
    if layout.word_bytes:
        rpcs += 6 * ["Publish"]
    service = Service(layout, **settings)
    try:
        for number in range(inputs):
            if not service.usable:  # a changed call was obeyed, and ended the run, or used all steps up
                service.close()
                service = _again(number, layout, settings)
            rpc = chance.choice(rpcs)
            requests = changed(rpc, service.good(rpc, chance), others, chance)
            outcomes[_try(service, rpc, requests, number)] += 1
            if number % 50 == 49 and service.usable:  # it still serves whom it should
                good = service.push(chance)
                answer = service.call("PushSparse", list(good))[0]
                model = service.engine.require_model(None)
                assert answer.version == model.version + bool(layout.word_bytes)
    finally:
        service.close()
    return outcomes


def _again(number: int, layout: ModelLayout, settings: dict[str, object]) -> Service:
    directory = settings.get("data_dir")
    return Service(layout, **(settings | ({"data_dir": f"{directory}/{number}"} if directory else {})))


def _try(service: Service, rpc: str, requests: list[Any], number: int) -> str:
    model = service.engine.require_model(None)
    before, version = model.theta.clone(), model.version
    try:
        service.call(rpc, requests)
        outcome = "obeyed"
    except Ended as ended:
        outcome = ended.code.name
    assert outcome != "INTERNAL", f"input {number}, {rpc}: {requests}"
    now = service.engine.require_model(None)
    same = now is model and torch.equal(model.theta.view(torch.uint8), before.view(torch.uint8))
    if outcome == "obeyed" and rpc in ("RestoreModel", "UploadModel"):  # what was changed may still make sense
        assert now.generation != model.generation or same
        service.generation = now.generation
    elif outcome == "obeyed" and rpc == "Publish":
        assert now.version in (version, version + 1)
    elif outcome != "obeyed" or rpc != "PushSparse" or model.mode.is_feed:
        assert same, f"input {number} has changed the parameters: {outcome}, {rpc}: {requests}"
        assert now.version == version
    else:
        assert now.version in (version, version + 1)
        assert bool(torch.isfinite(model.theta).all())
    return outcome


def main() -> int:
    """Run the long campaign, in the memory and over a data directory."""
    parser = argparse.ArgumentParser(prog="make fuzz-service", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="calls (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for number, part in enumerate(_parts(arguments.inputs)):
        with TemporaryDirectory() as directory:
            settings: dict[str, object] = {"data_dir": directory} if number % 2 else {}
            outcomes = campaign(part, arguments.seed + number, **settings)
        print(f"{part} calls: " + ", ".join(f"{name} {count}" for name, count in outcomes.most_common()), flush=True)
    return 0


def _parts(inputs: int, size: int = 10_000) -> Iterator[int]:
    while inputs > 0:
        yield min(size, inputs)
        inputs -= size


if __name__ == "__main__":
    sys.exit(main())
