"""From what was measured to what the model takes: the costs of one curve of a figure.

Every time and every number of entries comes from a run of the library on this machine, in the same run as the figure.
"""

import os
from dataclasses import dataclass, replace

import torch

from benchmarks.network import servercosts, workercosts
from benchmarks.network.model import Costs, Network, ReplyCosts, simulate
from benchmarks.network.servercosts import ReplyWork, ServerCosts
from benchmarks.network.workercosts import WorkerCosts
from benchmarks.workload.layouts import GROUP_ELEMENTS, groups
from pscore.model.layout import ModelLayout

VALUE_TYPES = ("fp16", "int8", "int4")
"""Of the sparse curves; fp32 is measured beside them, for what gRPC itself costs."""

_COVERED = (1, 4, 16)  # pushes that exact replies cover where they are measured


@dataclass(frozen=True, slots=True)
class Curve:
    """How training goes over the network.

    Attributes:
        value_type: of the push, and of a top-k reply.
        down: ``exact``, ``topk``, or ``dense`` for ASGD.
        overlap: of communication and compute.
    """

    value_type: str
    down: str
    overlap: bool = False

    @property
    def name(self) -> str:
        if self.down == "dense":
            return f"ASGD, dense {self.value_type}"
        reply = {"exact": "exact down", "topk": "top-k down"}[self.down]
        return f"DGS {self.value_type}, {reply}{', overlap' if self.overlap else ''}"


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that was measured for one model.

    Attributes:
        layout: of the model.
        density: of a push.
        server: see there.
        dense: a worker's dense step.
        sparse: a worker's sparse step, by value type.
        call: what a push and its pull cost by themselves, seconds.
        byte: what gRPC itself costs a byte, seconds.
    """

    layout: ModelLayout
    density: float
    server: ServerCosts
    dense: WorkerCosts
    sparse: dict[str, WorkerCosts]
    call: float = 0.0
    byte: float = 0.0

    def costs(self, curve: Curve) -> Costs:
        if curve.down == "dense":
            worker, push, density = self.dense, self.server.dense, 1.0
            size, replies = worker.push_size, [self._reply(self.server.whole, worker)]
        else:
            worker, push, density = self.sparse[curve.value_type], self.server.sparse, self.density
            size = worker.push_size
            if curve.down == "topk":
                works = self.server.topk[curve.value_type]
                unions = {count: 1 - (1 - density) ** count for count in works}
                replies = [replace(self._reply(work, worker), density=unions[n]) for n, work in works.items()]
            else:  # exact replies hold the parameters themselves, in their own type
                replies = [self._reply(work, worker) for work in (*self.server.exact.values(), self.server.whole)]
        return Costs(
            push_size=size,
            select=worker.select,
            encode=worker.encode,
            decode=push.decode + self.byte * size,
            apply=push.apply,
            call=self.call,
            density=density,
            replies=replies,
            groups=len(groups(self.layout, GROUP_ELEMENTS)),
            server_cores=os.cpu_count() or 1,
        )

    def bytes_alone(self, curve: Curve) -> Costs:
        """Return the same where nothing but bytes costs time: what the network allows, however fast its hosts are."""
        costs = self.costs(curve)
        replies = [ReplyCosts(reply.density, reply.size) for reply in costs.replies]
        return Costs(push_size=costs.push_size, density=costs.density, replies=replies, groups=costs.groups)

    @property
    def value_types(self) -> list[str]:
        return list(self.sparse)

    def _reply(self, work: ReplyWork, worker: WorkerCosts) -> ReplyCosts:
        size = work.frame_bytes + work.entries * work.value_bits / 8
        install = worker.install * work.entries / worker.reply_entries
        return ReplyCosts(work.density, size, work.build, work.encode + self.byte * size, install)


def measure(layout: ModelLayout, density: float, seed: int, *, quick: bool) -> Measured:
    """Measure a worker and a server, with one torch thread: several wait for the slowest of a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(layout, density, seed, quick=quick)
    finally:
        torch.set_num_threads(threads)


def _measure(layout: ModelLayout, density: float, seed: int, *, quick: bool) -> Measured:
    server = servercosts.measure(layout, density, _COVERED, VALUE_TYPES, 1 if quick else 3, seed)
    sparse = workercosts.sparse(layout, density, ("fp32", *VALUE_TYPES), 3 if quick else 7, seed)
    dense = workercosts.dense(layout, 1 if quick else 3, seed)
    measured = Measured(layout, density, server, dense, sparse)
    measured = replace(measured, call=_unexplained(measured, Curve("fp32", "exact")))
    traffic = dense.push_size + measured.costs(Curve("fp32", "dense")).reply(1).size
    return replace(measured, byte=_unexplained(measured, Curve("fp32", "dense")) / traffic)


def _unexplained(measured: Measured, curve: Curve) -> float:
    """Return by how much a worker's step on loopback takes longer than the model says: what gRPC itself costs."""
    worker = measured.dense if curve.down == "dense" else measured.sparse[curve.value_type]
    real = worker.select + worker.encode + worker.send + worker.wait + worker.install
    predicted = simulate(measured.costs(curve), Network(), 1, 0.0, overlap=False).step_seconds
    return max(0.0, real - predicted)
