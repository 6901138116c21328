"""All shards as one: their statuses in order, their workers in one table, and rates between two statuses."""

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pscore.wire.histories import losses
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.ctl.client import Outcome, ShardClients

_STATUS_SECONDS = 10.0  # the longest deadline of a status; a command's own calls may take longer

RATES = ("pushes", "pulls", "push_bytes", "pull_bytes")
"""Counts of a status whose rates are shown, as ``pushes_per_second`` and so on."""

Rates = dict[str, float]


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker over all shards that answered; the fields are those of ``--output json``.

    ``staleness`` is that of the last push, by shard index; ``missing_shards`` answered and have no lease of the worker.
    """

    worker_id: str
    incarnation: str
    step: int
    staleness: dict[int, int]
    lease_remaining_seconds: float
    idle_seconds: float
    pushes_per_second: float
    push_bytes: int
    pull_bytes: int
    missing_shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fleet:
    """The statuses of all shards at about the same time (monotonic seconds), by shard index; unreached ones last."""

    shards: tuple[Outcome, ...]
    seconds: float = field(default_factory=time.monotonic)

    @property
    def reached(self) -> dict[str, pb.GetStatusResponse]:
        """Statuses by address."""
        return {shard.address: shard.answer for shard in self.shards if shard.answer is not None}

    @property
    def unreached(self) -> list[Outcome]:
        """The other shards."""
        return [shard for shard in self.shards if shard.error is not None]

    def workers(self) -> list[Worker]:
        """Return the live workers of all shards by name; numbers in a name count by value."""
        found: dict[str, dict[int, pb.WorkerStatus]] = {}
        indices = sorted(status.shard_index for status in self.reached.values())
        for status in self.reached.values():
            for worker in status.workers:
                found.setdefault(worker.worker_id, {})[status.shard_index] = worker
        return [_joined(name, found[name], indices) for name in sorted(found, key=_natural)]

    def evicted(self) -> dict[str, float]:
        """Return the longest remaining ban of each evicted worker, seconds."""
        times: dict[str, float] = {}
        for status in self.reached.values():
            for each in status.evicted:
                times[each.worker_id] = max(times.get(each.worker_id, 0.0), each.remaining_seconds)
        return times

    def rates(self, before: "Fleet | None") -> dict[str, Rates]:
        """Return rates since an earlier time by address, without shards that have started anew meanwhile."""
        if before is None or self.seconds <= before.seconds:
            return {}
        seconds, rates = self.seconds - before.seconds, {}
        for address, now in self.reached.items():
            then = before.reached.get(address)
            if then is not None and now.uptime_seconds >= then.uptime_seconds:
                rates[address] = {
                    f"{name}_per_second": (getattr(now, name) - getattr(then, name)) / seconds for name in RATES
                }
        return rates


def read_fleet(clients: ShardClients) -> Fleet:
    """Ask every shard for its status; the addresses may be in any order."""
    outcomes = clients.all("GetStatus", pb.GetStatusRequest(), most_seconds=_STATUS_SECONDS)
    return Fleet(tuple(sorted(outcomes, key=lambda each: math.inf if each.answer is None else each.answer.shard_index)))


def disagreement(statuses: dict[str, pb.GetStatusResponse]) -> str:
    """Return why these servers are not different shards of one run; empty if they are."""
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


def losses_among(fleet: Fleet) -> dict[int, int]:
    """Return the versions that shards have lost and others have seen, by the index of each shard with a loss."""
    return losses(
        [
            (
                pb.ShardHistory(
                    shard_index=status.shard_index,
                    generation=status.generation,
                    version=status.version,
                    origins=status.origins,
                ),
                status.known_shards,
            )
            for status in fleet.reached.values()
        ]
    )


def saved_bytes(status: pb.GetStatusResponse) -> int:
    """Return the bytes of dense pushes and pulls minus those of the real ones; may be below 0."""
    return status.dense_push_bytes + status.dense_pull_bytes - status.push_bytes - status.pull_bytes


def saved_share(status: pb.GetStatusResponse) -> float | None:
    """Return :func:`saved_bytes` as a share of the dense bytes; ``None`` before the first push."""
    if not status.dense_push_bytes:
        return None
    return saved_bytes(status) / (status.dense_push_bytes + status.dense_pull_bytes)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts worker-2 before worker-10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def _joined(name: str, by_shard: dict[int, pb.WorkerStatus], indices: Sequence[int]) -> Worker:
    first, each = by_shard[min(by_shard)], by_shard.values()
    return Worker(
        worker_id=name,
        incarnation=first.incarnation,
        step=max(worker.last_step for worker in each),
        staleness={index: by_shard[index].staleness for index in sorted(by_shard)},
        lease_remaining_seconds=min(worker.lease_remaining_seconds for worker in each),
        idle_seconds=min(worker.idle_seconds for worker in each),
        pushes_per_second=1 / first.interval_seconds if first.interval_seconds > 0 else 0.0,
        push_bytes=sum(worker.push_bytes for worker in each),
        pull_bytes=sum(worker.pull_bytes for worker in each),
        missing_shards=tuple(index for index in indices if index not in by_shard),
    )
