"""Section 4: what must not grow: a server's memory with the number of workers, in exact mode."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks.harness.section import Plan, Section, Table
from benchmarks.harness.timing import Stat
from benchmarks.workload.layouts import noise_push, resnet18
from benchmarks.workload.raw_worker import RawWorker
from psclient.rpc.local_server import LocalServer
from pscore.model.layout import ModelLayout
from pscore.selection import DEFAULT_DENSE_BELOW
from psservice.process.maintenance import TRIM_SECONDS

KEY, TITLE = "memory", "Memory of a server as workers join"

_PUSHES = 24
_SETTLED_SECONDS = TRIM_SECONDS + 0.5  # the server gives freed memory back every few seconds
_TRIMMED = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


class Setting(NamedTuple):
    """A server to measure: how it replies, whether its allocator gives memory back at once, how many workers."""

    mode: str
    trimmed: bool
    workers: int

    def alone(self) -> "Setting":
        return self._replace(workers=1)


_QUICK = (Setting("exact", False, 1), Setting("exact", False, 4))
_FULL = (
    *(Setting("exact", trimmed, workers) for trimmed in (False, True) for workers in (1, 4, 8)),
    Setting("topk", True, 1),
    Setting("topk", True, 4),
)


def run(plan: Plan) -> Section:
    """Start a server for each setting, let raw workers train it, and read its resident set."""
    section = Section(KEY, TITLE)
    layout, repeats = resnet18(), 1 if plan.quick else 2
    settings = _QUICK if plan.quick else _FULL
    found: dict[Setting, list[dict[str, int]]] = {}
    started = time.monotonic()
    for repeat in range(repeats):
        if repeat and not plan.has_time((time.monotonic() - started) / repeat):
            break
        for setting in settings:
            plan.say(f"{setting.mode}, {setting.workers} workers ({repeat + 1} of {repeats})")
            with _environment(_TRIMMED if setting.trimmed else {}):
                found.setdefault(setting, []).append(_measure(plan, layout, setting))
    model = 4 * layout.size
    rows = []
    for setting, runs in found.items():
        alone = found[setting.alone()]
        more = Stat.of([(a["training"] - b["training"]) / model for a, b in zip(runs, alone, strict=True)])
        stats = {key: Stat.of([run[key] for run in runs]) for key in runs[0]}
        rows.append(
            (
                setting.mode,
                "gives back at once" if setting.trimmed else "as it is",
                str(setting.workers),
                *(_megabytes(stat) for stat in stats.values()),
                f"{more.median / (setting.workers - 1):+.2f}" if setting.workers > 1 else "",
            )
        )
        name = f"{setting.mode}{', trimmed' if setting.trimmed else ''}, {setting.workers} workers"
        section.figures[name] = {
            **{f"{key}_bytes": stat.plain() for key, stat in stats.items()},
            "models_more_than_one_worker": more.plain(),
        }
    heads = ("replies", "allocator", "workers", "empty, MB", "model, MB", "training, MB", "models more a worker")
    section.tables.append(Table(f"Resident set of a server process; a model is {model / 1e6:.1f} MB", heads, rows))
    section.notes += [
        f"ResNet-18 layout ({layout.size / 1e6:.1f} M parameters) whatever the rest measures, to keep the run short. "
        f"{_PUSHES} pushes in all, shared out evenly; after each round every worker pulls. "
        f"{len(found[settings[0]])} server(s) each.",
        "What exact mode holds is the model and the ledger of the pushes, whoever made them. The server gives freed "
        f"memory back every {TRIM_SECONDS:.0f} s; an allocator that does so at once (glibc's mmap and trim thresholds "
        "fixed at 128 KiB) shows what is held.",
    ]
    if any(setting.mode == "topk" for setting in settings):
        section.notes.append(
            "In top-k mode the server keeps an fp32 image of each worker by design (one model a worker), beside the "
            "reply that it owes."
        )
    return section


def _measure(plan: Plan, layout: ModelLayout, setting: Setting) -> dict[str, int]:
    rng = np.random.default_rng(plan.seed)
    with ExitStack() as stack:
        server = stack.enter_context(LocalServer(down_mode=setting.mode, buffers="none", lease_seconds=600))
        process = psutil.Process(server.processes[0].pid)
        found = {"empty": process.memory_info().rss}
        workers = [
            stack.enter_context(RawWorker(server.addresses[0], layout, f"worker-{number}"))
            for number in range(setting.workers)
        ]
        found["model"] = process.memory_info().rss
        for worker in workers:
            worker.pull()
        for _ in range(_PUSHES // setting.workers):
            for worker in workers:
                worker.push(noise_push(layout, plan.density, DEFAULT_DENSE_BELOW, rng))
            if setting.mode == "exact":
                for worker in workers:
                    worker.pull()
        if setting.mode == "topk":  # selection is slow: one difference a worker is enough to have its image
            for worker in workers:
                worker.pull()
        time.sleep(_SETTLED_SECONDS)
        return {**found, "training": process.memory_info().rss}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment for the processes that the body starts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _megabytes(stat: Stat) -> str:
    return f"{stat.median / 1e6:.0f} ({stat.low / 1e6:.0f}–{stat.high / 1e6:.0f})"
