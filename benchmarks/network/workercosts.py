"""What a step costs a worker, as the real optimizer reports it beside a real server on loopback."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

import psclient
from benchmarks.workload.synthetic import Noise, SyntheticModel
from psclient.optim.base import ParameterServerOptimizer
from psclient.settings import ClientSettings
from pscore.model.layout import ModelLayout

_WARMUP = 4  # steps until the thresholds have found their level


@dataclass(frozen=True, slots=True)
class WorkerCosts:
    """Medians over steps; seconds, bytes and entries.

    Attributes:
        select: to accumulate, select and cut out.
        encode: to write the push.
        send: to hand it to the transport.
        wait: for answer and reply, on loopback: all that the server does, and what the calls cost by themselves.
        install: to decode and write the reply, which is the worker's own push.
        push_size: message bytes.
        push_entries: in the push.
        reply_entries: in the reply.
    """

    select: float
    encode: float
    send: float
    wait: float
    install: float
    push_size: float
    push_entries: float
    reply_entries: float


def dense(layout: ModelLayout, steps: int, seed: int) -> WorkerCosts:
    """Take dense steps (ASGD, fp32)."""
    model = SyntheticModel(layout)
    with psclient.LocalServer(down_mode="exact", buffers="none") as server:
        optimizer = psclient.ASGD(model.parameters(), lr=0.01, model=model, server=server, worker="dense")
        return _take(optimizer, model, Noise(layout, seed), steps)


def sparse(
    layout: ModelLayout, density: float, value_types: Sequence[str], steps: int, seed: int
) -> dict[str, WorkerCosts]:
    """Take sparse steps (DGS) with each value type, all with one server."""
    found = {}
    with psclient.LocalServer(down_mode="exact", buffers="none") as server:
        for value_type in value_types:
            model = SyntheticModel(layout)
            optimizer = psclient.DGS(
                model.parameters(),
                lr=0.01,
                density=density,
                model=model,
                server=server,
                worker=value_type,
                settings=ClientSettings.model_validate({"value_type": value_type}),
            )
            found[value_type] = _take(optimizer, model, Noise(layout, seed), steps)
    return found


def _take(optimizer: ParameterServerOptimizer, model: torch.nn.Module, noise: Noise, steps: int) -> WorkerCosts:
    reports = []
    with optimizer:
        for step in range(_WARMUP + steps):
            noise.fill(model)
            optimizer.step(samples=1)
            if step >= _WARMUP:
                reports.append(optimizer.report)
    seconds = {phase: median(report.seconds[phase] for report in reports) for phase in reports[0].seconds}
    return WorkerCosts(
        select=seconds["select"],
        encode=seconds["encode"],
        send=seconds["send"],
        wait=seconds["wait"],
        install=seconds["apply"],
        push_size=median(report.push_bytes for report in reports),
        push_entries=median(report.push_entries for report in reports),
        reply_entries=median(report.pull_entries for report in reports),
    )
