"""All shards as one: their statuses in order, their workers in one table, and rates between two looks."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.operator.client import Lines, OperateError

_LOOK_SECONDS = 10.0
"""The longest deadline of a look; what is done may take longer."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard at a look: its status, or why there is none."""

    address: str
    status: pb.GetStatusResponse | None = None
    error: OperateError | None = None


@dataclass(frozen=True, slots=True)
class Rates:
    """What moved each second between two looks."""

    pushes: float
    pulls: float
    push_bytes: float
    pull_bytes: float


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker over all shards that were reached.

    Attributes:
        worker_id: its name.
        incarnation: its life, as the first shard has it.
        step: the last one that any shard has applied.
        staleness: of its last push, by shard index.
        lease_seconds: until the first of its leases ends.
        idle_seconds: since its last push.
        pushes_per_second: its pace; 0 before its second push.
        push_bytes: received from it.
        pull_bytes: sent to it.
        missing: shards that were reached and have no lease of it.
    """

    worker_id: str
    incarnation: str
    step: int
    staleness: dict[int, int]
    lease_seconds: float
    idle_seconds: float
    pushes_per_second: float
    push_bytes: int
    pull_bytes: int
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """Every shard at about the same time: those that answer by index, then the others; and when, monotonic seconds."""

    shards: tuple[Shard, ...]
    seconds: float = field(default_factory=time.monotonic)

    @property
    def reached(self) -> dict[str, pb.GetStatusResponse]:
        """Statuses by address, by shard index."""
        return {shard.address: shard.status for shard in self.shards if shard.status is not None}

    @property
    def errors(self) -> dict[str, OperateError]:
        """Why the others have none, by address."""
        return {shard.address: shard.error for shard in self.shards if shard.error is not None}

    def workers(self) -> list[Worker]:
        """Return the live workers of all shards by name, numbers in it by value."""
        found: dict[str, dict[int, pb.WorkerStatus]] = {}
        indices = [status.shard_index for status in self.reached.values()]
        for status in self.reached.values():
            for worker in status.workers:
                found.setdefault(worker.worker_id, {})[status.shard_index] = worker
        return [_joined(name, found[name], indices) for name in sorted(found, key=_natural)]

    def rates(self, before: "Look | None") -> dict[str, Rates]:
        """Return by address what moved since an earlier look; shards that have started anew meanwhile are left out."""
        if before is None or self.seconds <= before.seconds:
            return {}
        seconds, rates = self.seconds - before.seconds, {}
        for address, now in self.reached.items():
            then = before.reached.get(address)
            if then is None or now.uptime_seconds < then.uptime_seconds:
                continue
            rates[address] = Rates(
                (now.pushes - then.pushes) / seconds,
                (now.pulls - then.pulls) / seconds,
                (now.push_bytes - then.push_bytes) / seconds,
                (now.pull_bytes - then.pull_bytes) / seconds,
            )
        return rates


def look(lines: Lines) -> Look:
    """Ask every shard for its status, in any order of addresses."""
    outcomes = lines.all("GetStatus", pb.GetStatusRequest(), most_seconds=_LOOK_SECONDS)
    shards = [Shard(each.address, each.answer, each.error) for each in outcomes]
    last = max((shard.status.shard_index for shard in shards if shard.status is not None), default=0) + 1
    return Look(tuple(sorted(shards, key=lambda shard: last if shard.status is None else shard.status.shard_index)))


def disagreement(statuses: dict[str, pb.GetStatusResponse]) -> str:
    """Return why these servers are not different shards of one run; empty where they are."""
    places: dict[int, str] = {}
    for address, status in statuses.items():
        other = places.setdefault(status.shard_index, address)
        if other != address:
            return f"{other} and {address} are both shard {status.shard_index}"
    for what in ("num_shards", "run_id"):
        values = {getattr(status, what): address for address, status in statuses.items() if getattr(status, what)}
        if len(values) > 1:
            (one, first), (two, second), *_ = values.items()
            return f"{first} has {what} {one}, {second} has {two}"
    return ""


def saved_bytes(status: pb.GetStatusResponse) -> int:
    """Return how many bytes less than dense pushes and pulls took; below 0 where they took more."""
    return status.dense_push_bytes + status.dense_pull_bytes - status.push_bytes - status.pull_bytes


def saved_share(status: pb.GetStatusResponse) -> float | None:
    """Return the share of the dense bytes that was saved; ``None`` before the first push."""
    if not status.dense_push_bytes:
        return None
    return saved_bytes(status) / (status.dense_push_bytes + status.dense_pull_bytes)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return what sorts worker-2 before worker-10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def _joined(name: str, by_shard: dict[int, pb.WorkerStatus], indices: Sequence[int]) -> Worker:
    first = by_shard[min(by_shard)]
    each = by_shard.values()
    return Worker(
        name,
        first.incarnation,
        max(worker.last_step for worker in each),
        {index: by_shard[index].staleness for index in sorted(by_shard)},
        min(worker.lease_remaining_seconds for worker in each),
        min(worker.idle_seconds for worker in each),
        1 / first.interval_seconds if first.interval_seconds > 0 else 0.0,
        sum(worker.push_bytes for worker in each),
        sum(worker.pull_bytes for worker in each),
        tuple(index for index in sorted({*indices}) if index not in by_shard),
    )
