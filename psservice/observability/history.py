"""The past of a run, for the curves of the status page: some hundred points, kept in memory only."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

RECENT_POINTS = 300
WHOLE_POINTS = 600


@dataclass(frozen=True, slots=True)
class Point:
    """The figures of an interval that ended at ``unix_seconds``.

    Attributes:
        seconds: length of the interval.
        pushes_per_second: that shard 0, or the shard itself, has applied: each makes a version.
        samples_per_second: of all workers.
        push_bytes_per_second, pull_bytes_per_second: message bytes of all shards.
        staleness_median, staleness_largest: of the last pushes of all live workers, on the worst shard.
        loss: mean of the losses that workers have told; ``None`` if none has.
        workers: that are live.
    """

    unix_seconds: float
    seconds: float
    pushes_per_second: float
    samples_per_second: float
    push_bytes_per_second: float
    pull_bytes_per_second: float
    staleness_median: float
    staleness_largest: int
    loss: float | None
    workers: int


def merged(points: Sequence[Point]) -> Point:
    """Return neighbouring intervals, one at least, as one: means over time, and the largest of the largest."""
    total = sum(point.seconds for point in points)

    def mean(name: str) -> float:
        weighted: float = sum(getattr(point, name) * point.seconds for point in points)
        return weighted / total

    told = [(point.loss, point.seconds) for point in points if point.loss is not None]
    return Point(
        unix_seconds=points[-1].unix_seconds,
        seconds=total,
        pushes_per_second=mean("pushes_per_second"),
        samples_per_second=mean("samples_per_second"),
        push_bytes_per_second=mean("push_bytes_per_second"),
        pull_bytes_per_second=mean("pull_bytes_per_second"),
        staleness_median=mean("staleness_median"),
        staleness_largest=max(point.staleness_largest for point in points),
        loss=sum(loss * seconds for loss, seconds in told) / sum(seconds for _, seconds in told) if told else None,
        workers=max(point.workers for point in points),
    )


class History:
    """The last points as they came, and the whole time in at most ``whole_points``. Thread-safe.

    If those of the whole time are full, every two become one, and from then on twice as many make one. The newest one
    of the whole time may still grow.
    """

    def __init__(self, recent_points: int = RECENT_POINTS, whole_points: int = WHOLE_POINTS) -> None:
        self._recent: deque[Point] = deque(maxlen=recent_points)
        self._whole: list[Point] = []
        self._growing: list[Point] = []
        self._most, self._each = whole_points, 1
        self._lock = threading.Lock()

    def add(self, point: Point) -> None:
        """Append a point, of an interval longer than nothing."""
        with self._lock:
            self._recent.append(point)
            self._growing.append(point)
            if len(self._growing) < self._each:
                return
            self._whole.append(merged(self._growing))
            self._growing = []
            if len(self._whole) >= self._most:
                self._whole = [merged(self._whole[at : at + 2]) for at in range(0, len(self._whole), 2)]
                self._each *= 2

    def recent(self) -> list[Point]:
        """Return the last points, oldest first."""
        with self._lock:
            return [*self._recent]

    def whole(self) -> list[Point]:
        """Return points of the whole time since the server's start, oldest first."""
        with self._lock:
            return [*self._whole, *([merged(self._growing)] if self._growing else [])]


def columns(points: Sequence[Point]) -> dict[str, list[Any]]:
    """Return points as JSON has them: a list for each attribute, with six digits but for the time."""
    found: dict[str, list[Any]] = {field.name: [] for field in fields(Point)}
    for point in points:
        for name, value in asdict(point).items():
            is_long = isinstance(value, float) and name != "unix_seconds"
            found[name].append(float(f"{value:.6g}") if is_long else value)
    return found
