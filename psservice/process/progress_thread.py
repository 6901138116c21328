"""A thread that measures how a shard fares every two seconds, for its status, shard 0's and the page's curves."""

import logging
import statistics
import threading
from typing import NamedTuple

from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.observability.history import Point
from psservice.shard.progress import LONGEST_AGE_SECONDS
from psservice.shard.shard import Shard

log = logging.getLogger(__name__)

PERIOD_SECONDS = 2.0


class Counts(NamedTuple):
    """Counts since the start of the process, at a moment of the monotonic clock."""

    seconds: float
    pushes: int
    push_bytes: int
    pull_bytes: int
    samples: int

    @classmethod
    def of(cls, shard: Shard) -> "Counts":
        """Return the counts now; from any thread."""
        traffic = shard.metrics.traffic
        return cls(
            shard.environment.monotonic(),
            shard.metrics.pushes,
            traffic["PushSparse"].received_bytes,
            traffic["PullDiff"].sent_bytes,
            shard.run.samples,
        )


class ProgressThread:
    """Measures a shard, from the start until :meth:`close`; it holds no lock meanwhile, and nothing waits for it."""

    def __init__(self, shard: Shard) -> None:
        self._shard, self._before = shard, Counts.of(shard)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="progress", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stop.wait(PERIOD_SECONDS):
            try:
                self._before = measure(self._shard, self._before)
            except Exception:  # people see less, and the training goes on
                log.exception("the progress could not be measured")


def measure(shard: Shard, before: Counts) -> Counts:
    """Note the progress since ``before``, and return the counts now."""
    now = Counts.of(shard)
    seconds = now.seconds - before.seconds
    if seconds <= 0:
        return before
    members = shard.leases.members()
    staleness = [member.staleness for member in members if member.pushes]
    model = shard.model
    own = pb.ShardProgress(
        shard_index=shard.settings.shard_index,
        version=model.version if model else 0,
        pushes_per_second=(now.pushes - before.pushes) / seconds,
        push_bytes_per_second=(now.push_bytes - before.push_bytes) / seconds,
        pull_bytes_per_second=(now.pull_bytes - before.pull_bytes) / seconds,
        staleness_median=statistics.median(staleness) if staleness else 0.0,
        staleness_largest=max(staleness, default=0),
        draining=shard.drain_gate.is_closed,
        durable=shard.durability.is_healthy,
    )
    shard.progress.measured(own)
    shards = [each for each in shard.progress.known() if each.age_seconds <= LONGEST_AGE_SECONDS]
    shard.progress.history.add(
        Point(
            unix_seconds=round(shard.environment.unix_seconds(), 1),
            seconds=seconds,
            pushes_per_second=own.pushes_per_second,
            samples_per_second=max(0.0, (now.samples - before.samples) / seconds),  # fewer after a restore
            push_bytes_per_second=sum(each.push_bytes_per_second for each in shards),
            pull_bytes_per_second=sum(each.pull_bytes_per_second for each in shards),
            staleness_median=max(each.staleness_median for each in shards),
            staleness_largest=max(each.staleness_largest for each in shards),
            loss=shard.progress.take_loss(),
            workers=len(members),
        )
    )
    return now
