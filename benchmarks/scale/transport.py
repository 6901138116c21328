"""What gRPC costs beside the engine, and what a client costs: real servers, one client at a time."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import grpc
import torch

import psclient
from benchmarks.harness.generators import Window
from benchmarks.scale.costs import Costs
from benchmarks.scale.engine import Points
from benchmarks.scale.real import Stage
from benchmarks.workload.raw_worker import join_request
from benchmarks.workload.replay_worker import CALL_SECONDS
from benchmarks.workload.synthetic import Noise, SyntheticModel
from pscore.model.layout import ModelLayout, TensorSpec
from pscore.net.proxies import NO_PROXY
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub

_SECONDS = 2.0
CROWD = 16
"""Clients that keep a server's interpreter busy all the time."""

_CROWD_ROUNDS = 3
_RENEWALS = 400
_TENSORS = 8
_WARM_STEPS = 4  # until the thresholds have found their level
_WORKER = (
    ("worker_select", "", ("select",)),
    ("worker_encode", "push_entries", ("encode", "send")),
    ("worker_install", "pull_entries", ("apply",)),
)
"""A worker's costs: for each element, or for each entry of a push or reply, the phases of its report."""


@dataclass
class Transport:
    """What was found: (bytes, seconds) by cost, as in :class:`~benchmarks.scale.costs.Costs`.

    Attributes:
        points: of calls; of the worker in elements and entries.
        idle: seconds of a call in which nobody computed, each time.
        crowding: see there.
        crowded: steps a second of :data:`CROWD` clients that do not think, each time.
        renewal: see there, each time.
        server_bytes: resident set of a server, its model apart.
    """

    points: Points = field(default_factory=dict)
    idle: list[float] = field(default_factory=list)
    crowding: list[float] = field(default_factory=list)
    crowded: list[float] = field(default_factory=list)
    renewal: list[float] = field(default_factory=list)
    server_bytes: float = 0.0

    def add(self, name: str, units: float, seconds: float, of: float) -> None:
        """Note a measurement, and what it is a part of."""
        self.points.setdefault(name, []).append((units, max(0.0, seconds), of))


def measure(
    engine: Costs, sizes: Sequence[int], density: float, rounds: int, seed: int, say: Callable[[str], None]
) -> Transport:
    """Run one client, then two and four, beside a server of each size; a crowd beside the smallest.

    Args:
        engine: what the server's own work costs, which is taken away from what its process uses.
        sizes: of models; not those that the model is checked with.
        density: of pushes.
        rounds: of each.
        seed: of the updates.
        say: shows what is going on.
    """
    found = Transport()
    for size in sizes:
        say(f"transport: {size:,} elements")
        with Stage(size, density, 1, CROWD, "exact", seed) as stage:
            stage.warm_up(2)
            for _ in range(rounds):
                alone = stage.run(1, 0.0, _SECONDS, pulls=False)
                both = stage.run(1, 0.0, _SECONDS)
                crowd = [stage.run(workers, 0.0, _SECONDS, pulls=False) for workers in (2, 4)]
                _note(found, engine, size * density, alone, both)
                cost = alone.server_cpu / alone.pushes
                found.crowding += [seen.server_cpu / seen.pushes / cost - 1 for seen in crowd]
            if size == min(sizes):  # they wait for the interpreter there, and not for the apply thread or for bytes
                found.crowded = [stage.run(CROWD, 0.0, _SECONDS).rate for _ in range(_CROWD_ROUNDS)]
            found.renewal.append(_renewal(stage))
            found.server_bytes = found.server_bytes or stage.processes[0].memory_info().rss - 4.0 * size
    return found


def _note(found: Transport, engine: Costs, entries: float, alone: Window, both: Window) -> None:
    """Take away what the engine's work costs; the rest is the calls'."""
    push = engine.decode(entries) + engine.apply(entries)
    pull = engine.gather(entries) + engine.encode(entries)  # of one push, which needs no union
    server, servers = (seen.server_cpu / seen.pushes for seen in (alone, both))
    client, clients = (seen.generator_cpu / seen.pushes for seen in (alone, both))
    found.add("push_call", alone.sent, server - push, server)
    found.add("client_push", alone.sent, client, client)
    found.add("pull_call", both.received, servers - server - pull, servers)
    found.add("client_pull", both.received, clients - client, clients)
    found.idle.append(max(0.0, alone.push_seconds - server - client))


def _renewal(stage: Stage) -> float:
    """Return the CPU time of a server for one renewal of a lease."""
    with grpc.insecure_channel(stage.addresses[0], NO_PROXY) as channel:
        stub = ParameterServerServiceStub(channel)
        request = join_request(stage.layout, 0, 1)
        request.identity.worker_id, request.identity.incarnation = "renewer", str(uuid.uuid4())
        request.identity.run_id = stub.Join(request, timeout=CALL_SECONDS).run_id
        renew = pb.RenewLeaseRequest(identity=request.identity)
        before = sum(stage.processes[0].cpu_times()[:2])
        for _ in range(_RENEWALS):
            stub.RenewLease(renew, timeout=CALL_SECONDS)
        seconds: float = sum(stage.processes[0].cpu_times()[:2]) - before
        stub.Leave(pb.LeaveRequest(identity=request.identity), timeout=CALL_SECONDS)
    return seconds / _RENEWALS


def worker(sizes: Sequence[int], density: float, steps: int, seed: int) -> Points:
    """Return what a real worker's step costs, beside a real server: (elements or entries, seconds)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    points: Points = {}
    try:
        for size in sizes:
            specs = (TensorSpec(f"layer{i}", (size // _TENSORS,), torch.float32) for i in range(_TENSORS))
            layout = ModelLayout(tuple(specs))
            model, noise, reports = SyntheticModel(layout), Noise(layout, seed), []
            with (
                psclient.LocalServer(down_mode="exact", buffers="none") as server,
                psclient.DGS(
                    model.parameters(), lr=0.01, density=density, model=model, server=server, worker="costs"
                ) as optimizer,
            ):
                for _ in range(_WARM_STEPS + steps):
                    noise.fill(model)
                    optimizer.step(samples=1)
                    reports.append(optimizer.report)
            for name, units, phases in _WORKER:
                counted = reports[_WARM_STEPS:]
                seconds = median(sum(report.seconds[phase] for phase in phases) for report in counted)
                entries = median(getattr(report, units) for report in counted) if units else size
                points.setdefault(name, []).append((entries, seconds))
    finally:
        torch.set_num_threads(threads)
    return points
