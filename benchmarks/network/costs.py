"""From what was measured to what the model takes: the costs of one curve of a figure.

Every time and every number of entries comes from a run of the library on this machine, in the same run as the figure.
A value type that the library cannot send yet takes the times of fp16, and its bytes by the bits of a value.
"""

import os
from dataclasses import dataclass, replace

import torch

from benchmarks.layouts import GROUP_ELEMENTS, groups
from benchmarks.network import servercosts, workercosts
from benchmarks.network.model import Costs, Network, ReplyCosts, simulate
from benchmarks.network.servercosts import ReplyWork, ServerCosts
from benchmarks.network.workercosts import WorkerCosts
from pscore.layout import ModelLayout

VALUE_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4}
"""Bits of a value, without the bounds that a block of 8-bit or 4-bit values carries (under a tenth of a bit each)."""

_STAND_IN = "fp16"
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
        """For a legend."""
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
        call: what one call costs by itself, seconds.
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
        """Return what the model takes."""
        if curve.down == "dense":
            worker, push, density = self.dense, self.server.dense, 1.0
            size, replies = worker.push_size, [self._reply(self.server.whole, 32, worker)]
        else:
            worker, push, density = self._sparse(curve.value_type), self.server.sparse, self.density
            size = self._push_size(curve.value_type)
            if curve.down == "topk":
                replies = [self._reply(self.server.topk, VALUE_BITS[curve.value_type], worker)]
            else:  # exact replies hold the parameters themselves, in their own type
                works = [*self.server.exact.values(), self.server.whole]
                replies = [self._reply(work, 32, worker) for work in works]
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

    def stands_in(self, value_type: str) -> bool:
        """Tell whether times are those of another value type."""
        return value_type not in self.sparse

    @property
    def value_types(self) -> list[str]:
        """What was measured."""
        return list(self.sparse)

    def _sparse(self, value_type: str) -> WorkerCosts:
        return self.sparse.get(value_type) or self.sparse[_STAND_IN]

    def _push_size(self, value_type: str) -> float:
        worker = self._sparse(value_type)
        if not self.stands_in(value_type):
            return worker.push_size
        return worker.push_size - worker.push_entries * (VALUE_BITS[_STAND_IN] - VALUE_BITS[value_type]) / 8

    def _reply(self, work: ReplyWork, value_bits: float, worker: WorkerCosts) -> ReplyCosts:
        size = work.frame_bytes + work.entries * value_bits / 8
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
    server = servercosts.measure(layout, density, _COVERED, 1 if quick else 3, seed)
    types = workercosts.available(("fp32", _STAND_IN) if quick else tuple(VALUE_BITS))
    sparse = workercosts.sparse(layout, density, types, 3 if quick else 7, seed)
    dense = workercosts.dense(layout, 1 if quick else 3, seed)
    measured = Measured(layout, density, server, dense, sparse)
    measured = replace(measured, call=_unexplained(measured, Curve("fp32", "exact")) / 2)
    traffic = dense.push_size + measured.costs(Curve("fp32", "dense")).reply(1).size
    return replace(measured, byte=_unexplained(measured, Curve("fp32", "dense")) / traffic)


def _unexplained(measured: Measured, curve: Curve) -> float:
    """Return by how much a worker's step on loopback takes longer than the model says: what gRPC itself costs."""
    worker = measured.dense if curve.down == "dense" else measured.sparse[curve.value_type]
    real = worker.select + worker.encode + worker.send + worker.wait + worker.install
    predicted = simulate(measured.costs(curve), Network(), 1, 0.0, overlap=False).step_seconds
    return max(0.0, real - predicted)
