"""What readers cost: the pause of a module, a worker's push beside many readers, and a join over a slow line."""

import os
import threading
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection

import grpc
import numpy as np
import torch

import psclient
from benchmarks.harness.children import Child, begin
from benchmarks.harness.section import Plan, Section, Table
from benchmarks.harness.timing import Case, Rounds, Stat, interleave, ratio
from benchmarks.network import lab
from benchmarks.workload.layouts import noise_push, resnet18
from benchmarks.workload.raw_worker import RawWorker
from psclient.reader.module_sink import ModuleSink
from psclient.reader.sink import StagedCut
from psclient.rpc.local_server import LocalServer
from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.net.proxies import NO_PROXY
from pscore.reader.cut import Cut, ShardVersion
from pscore.selection import DEFAULT_DENSE_BELOW
from pscore.wire import frames
from pscore.wire.codecs.names import READABLE_INDEX_CODECS
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub

KEY, TITLE = "readers", "What readers of a run cost"

READERS = (0, 1, 8, 64)
_PROCESSES = 2  # that share the readers
_PUSH_SECONDS = 0.1  # between the beginnings of two pushes
_READER_BITS = 10e6  # a second, of a reader's line: it then waits for as long as its bytes take there
_POLL_SECONDS = 0.05
_LEAST_PRIORITY = 19
_COMMIT, _SCATTER, _COPY = "commit", "one scatter of the values", "copy of the values"
_WAIT_SECONDS = 30.0
_LINE_BITS = 100e6


def run(plan: Plan) -> Section:
    """Measure the pause, then pushes, then the join."""
    section = Section(KEY, TITLE)
    pauses = {share: _pause(plan, share) for share in (0.001, 0.01, 0.05)}
    rows = [
        (f"{share:.1%}", *(Stat.of(found[case]).milliseconds() for case in (_COMMIT, _SCATTER, _COPY)),
         ratio(found, _COMMIT, _SCATTER).ratio())
        for share, found in pauses.items()
    ]  # fmt: skip
    heads = ("changed", _COMMIT, _SCATTER, _COPY, "commit to scatter")
    section.tables.append(Table(f"The pause of a module ({plan.layout_name}), milliseconds", heads, rows))
    section.figures["pause"] = {str(share): ratio(found, _COMMIT, _SCATTER).plain() for share, found in pauses.items()}
    pushes = _pushes(plan)
    heads = ("readers", "median, ms", "99th percentile, ms", "to none", "versions a second, each reader")
    base = _percentile(pushes[0][0], 0.99)
    rows = [
        (
            str(count),
            f"{1e3 * _percentile(seconds, 0.5):.1f}",
            f"{1e3 * _percentile(seconds, 0.99):.1f}",
            f"{_percentile(seconds, 0.99) / base:.2f}",
            f"{rate:.1f}",
        )
        for count, (seconds, rate) in pushes.items()
    ]
    title = f"A push of {plan.density:.0%} (ResNet-18) every {_PUSH_SECONDS:g} s beside readers of this machine"
    section.tables.append(Table(title, heads, rows))
    section.figures["push_99th_percentile_seconds"] = {
        str(count): _percentile(seconds, 0.99) for count, (seconds, _) in pushes.items()
    }
    reason = lab.unavailable()
    if reason:
        section.notes.append(f"No join over a line: {reason}")
    else:
        seconds, least = _join(plan)
        section.figures["join"] = {"seconds": seconds, "of_line": least / seconds}
        section.tables.append(
            Table(
                f"A reader joins (ResNet-18, {_LINE_BITS / 1e6:g} Mbit/s), seconds",
                ("join", "its bytes over the line", "share of the line"),
                [(f"{seconds:.2f}", f"{least:.2f}", f"{least / seconds:.2f}")],
            )
        )
    section.notes += [
        "The pause is the time in which nobody may hold the module; what is overwritten was read, and the digest "
        "computed, before.",
        f"Readers ask for the newest version when they have got one and its bytes had time for a line of "
        f"{_READER_BITS / 1e6:g} Mbit/s, and throw its messages away; they share this machine's cores with the server "
        "and the worker, at the least priority.",
    ]
    return section


# The pause


class _Named(torch.nn.Module):
    """A module with the parameters of a layout."""

    def __init__(self, layout: ModelLayout) -> None:
        super().__init__()
        for spec in layout.parameters:
            parent, path = self, spec.name.split(".")
            for name in path[:-1]:
                if not hasattr(parent, name):
                    parent.add_module(name, _Named(ModelLayout(())))
                parent = getattr(parent, name)
            parent.register_parameter(path[-1], torch.nn.Parameter(torch.zeros(spec.shape)))


def _pause(plan: Plan, share: float) -> Rounds:
    plan.say(f"the pause with {share:.1%} changed")
    layout = ModelLayout(plan.layout.parameters)
    sink, flat = ModuleSink(_Named(layout)), torch.zeros(layout.size)
    sink.open(layout)
    span, rng = Span(0, layout.size), np.random.default_rng(plan.seed)
    offsets = torch.from_numpy(np.sort(rng.choice(layout.size, int(share * layout.size), replace=False)))
    values = torch.randn(offsets.numel())
    target = torch.empty_like(values)
    entries = SparseSlice(span, offsets, values)
    cut = Cut("bench", (ShardVersion(1, 1, bytes(16)),))

    def commit(turn: int) -> dict[str, float]:
        sink.stage(StagedCut(cut, layout, [entries], [sink.read(entries)], None, is_whole=False))
        began = time.perf_counter()
        with torch.no_grad():
            sink.commit()
        return {"": time.perf_counter() - began}

    def scatter(turn: int) -> None:
        flat.numpy()[offsets.numpy()] = values.numpy()

    def copy(turn: int) -> None:
        target.copy_(values)

    cases: dict[str, Case] = {_COMMIT: commit, _SCATTER: scatter, _COPY: copy}
    return interleave(cases, plan.rounds, has_time=plan.has_time)


# Pushes beside readers


def read_on(connection: Connection, address: str, count: int, layout: ModelLayout) -> None:
    """Follow with so many readers, a thread each, until told to stop; answer with the versions that they have read."""
    os.nice(_LEAST_PRIORITY)  # elsewhere they would have cores of their own
    stop, read = threading.Event(), [0] * count
    channels = [
        grpc.insecure_channel(address, (*NO_PROXY, ("grpc.use_local_subchannel_pool", 1))) for _ in range(count)
    ]
    threads = [
        threading.Thread(target=_follow, args=(channel, number, layout, read, stop), daemon=True)
        for number, channel in enumerate(channels)
    ]
    for thread in threads:
        thread.start()
    while not all(read):
        time.sleep(_POLL_SECONDS)
    connection.send("ready")
    connection.recv()
    connection.recv()
    before = [*read]
    connection.send("noted")
    connection.recv()
    connection.send(sum(read) - sum(before))
    stop.set()
    for channel in channels:
        channel.close()


def _follow(channel: grpc.Channel, number: int, layout: ModelLayout, read: list[int], stop: threading.Event) -> None:
    stub, known = ParameterServerServiceStub(channel), pb.AwaitCutResponse()
    while not stop.is_set():
        try:
            before = known.cut.shards[0] if known.cut.shards else None
            known = stub.AwaitCut(
                pb.AwaitCutRequest(
                    reader=str(number),
                    known=known.cut.shards,
                    fingerprint=layout.fingerprint,
                    wait_seconds=_WAIT_SECONDS,
                ),
                timeout=2 * _WAIT_SECONDS,
            )
            now = known.cut.shards[0]
            part = pb.HeldPart(end=layout.size, has_version=before is not None, version=before.version if before else 0)
            request = pb.ReadCutRequest(version=now, held=[part], index_codecs=READABLE_INDEX_CODECS)
            nbytes = sum(frames.wire_bytes(message) for message in stub.ReadCut(request, timeout=2 * _WAIT_SECONDS))
            read[number] += 1
            if before is not None:  # all begin together
                stop.wait(8 * nbytes / _READER_BITS)
        except (grpc.RpcError, ValueError):  # too slow for a cut, or the channel is closed
            if not stop.is_set():
                known = pb.AwaitCutResponse()


def _pushes(plan: Plan) -> dict[int, tuple[list[float], float]]:
    """Return the seconds of each push, and how many versions a second each reader read, by the number of readers."""
    layout, rng = ModelLayout(resnet18().parameters), np.random.default_rng(plan.seed)
    updates = [noise_push(layout, plan.density, DEFAULT_DENSE_BELOW, rng) for _ in range(8)]
    count = 60 if plan.quick else 200
    found: dict[int, tuple[list[float], float]] = {}
    lease = {"down_mode": "exact", "lease_seconds": 600.0}  # nobody renews it while readers join
    with LocalServer(**lease) as server, RawWorker(server.addresses[0], layout, "pusher") as worker:
        for _ in range(10):
            worker.push(updates[0])
        for readers in (READERS[0], READERS[-1]) if plan.quick else READERS:
            plan.say(f"pushes beside {readers} readers")
            with ExitStack() as stack:
                shares = [len(range(number, readers, _PROCESSES)) for number in range(_PROCESSES)]
                children = [
                    stack.enter_context(Child(f"readers {number}", read_on, server.addresses[0], share, layout))
                    for number, share in enumerate(shares)
                    if share
                ]
                begin(children, 4 * _WAIT_SECONDS)
                _paced(worker, updates, 10)
                for child in children:
                    child.tell()
                    child.hear(_WAIT_SECONDS)
                began = time.perf_counter()
                seconds = _paced(worker, updates, count)
                took = time.perf_counter() - began
                for child in children:
                    child.tell()
                read = sum(child.hear(_WAIT_SECONDS) for child in children)
                found[readers] = seconds, read / took / max(1, readers)
    return found


def _paced(worker: RawWorker, updates: list[SparseSlice], count: int) -> list[float]:
    """Push at a pace that readers do not change; return the seconds of each push."""
    seconds, due = [], time.perf_counter()
    for number in range(count):
        due = max(due + _PUSH_SECONDS, time.perf_counter())
        time.sleep(max(0.0, due - time.perf_counter()))
        began = time.perf_counter()
        worker.push(updates[number % len(updates)])
        seconds.append(time.perf_counter() - began)
    return seconds


def _percentile(seconds: list[float], share: float) -> float:
    return float(np.quantile(seconds, share))


# A join


def join(connection: Connection, address: str, space: str) -> None:
    """Follow with a module from another host; answer with the seconds until it has a version."""
    lab.enter(space)
    module = _Named(ModelLayout(resnet18().parameters))
    connection.send("ready")
    connection.recv()
    began = time.perf_counter()
    with psclient.follow(address, module) as follower:
        follower.wait_for(0, 20 * _WAIT_SECONDS)
        connection.send((time.perf_counter() - began, follower.fetched_bytes))


def _join(plan: Plan) -> tuple[float, float]:
    plan.say("a join over a line")
    from benchmarks.campaign.processes import server  # late: campaigns are more than this section needs

    with lab.Lab(2, _LINE_BITS) as line:
        settings = {"listen": f"{line.address(1)}:0", "insecure": True}
        with (
            server(settings, line.space(1)) as address,
            Child("uploader", upload, address, line.space(1)) as uploader,
            Child("reader", join, address, line.space(0)) as reader,
        ):
            begin([uploader], 4 * _WAIT_SECONDS)
            begin([reader], 4 * _WAIT_SECONDS)
            seconds, nbytes = reader.hear(20 * _WAIT_SECONDS)
            uploader.tell()
    return seconds, 8 * nbytes / _LINE_BITS


def upload(connection: Connection, address: str, space: str) -> None:
    """Bring a model to a server, and stay its worker until told to leave."""
    lab.enter(space)
    with RawWorker(address, ModelLayout(resnet18().parameters), "uploader"):
        connection.send("ready")
        connection.recv()
        connection.recv()
