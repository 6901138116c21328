"""When the parts of one push were ready, sent and arrived."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from psclient.buckets.costs import Costs, Timeline


class PushTiming:
    """One shard's part of a push; lists are by place in its plan, which has so many ``groups``.

    Attributes:
        together_bytes: groups are gathered into a message until it has so many.
        group_bytes: message bytes of each group.
        left: when a group's last message was handed to the transport, seconds after ``opened``; 0 for one that was in
            the first message, with the header, and negative for a group without any.
        opened: when the first message was handed to the transport, :func:`time.perf_counter`; 0 before.
        arrived: when a group was whole at the server, seconds after the header was there, on its clock; empty until
            answered, and after a repetition, which shows nothing.
    """

    def __init__(self, groups: int, together_bytes: int = 0) -> None:
        self.together_bytes = together_bytes
        self.group_bytes = [0] * groups
        self.left = [-1.0] * groups
        self.opened = 0.0
        self.arrived: list[float] = []

    def header_arrival(self, costs: Costs) -> float:
        """Return when the header's message was at the server by these costs, :func:`time.perf_counter`."""
        return self.opened + costs.message + costs.byte * self.first_bytes

    @property
    def first_bytes(self) -> int:
        """Bytes of the groups that were in the message of the header."""
        return sum(nbytes for nbytes, left in zip(self.group_bytes, self.left, strict=True) if left == 0)

    def note_sent(self, groups: Iterable[int]) -> None:
        """Note that a message has been handed to the transport, with fields of these groups."""
        now = time.perf_counter()
        self.opened = self.opened or now
        for group in groups:
            self.left[group] = now - self.opened


@dataclass(slots=True)
class Trace:
    """One push; moments are of :func:`time.perf_counter`.

    Attributes:
        opening: when opening it began.
        begun: when work on the first group began.
        done: when a group was handed to the transport, by group.
        ready: when gradients were there, by position; empty where all were there before the push.
        entries: that each tensor with a gradient sent, by position.
        shards: for each shard, the place of each group in its plan, and its timing.
        answered: when the last shard had answered; 0 before.
    """

    groups: Sequence[range]
    opening: float
    begun: float = 0.0
    done: dict[int, float] = field(default_factory=dict)
    ready: Mapping[int, float] = field(default_factory=dict)
    entries: dict[int, int] = field(default_factory=dict)
    shards: Sequence[tuple[Mapping[int, int], PushTiming]] = ()
    answered: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether it shows an ordinary step from its first gradient to its answer."""
        return (
            bool(self.entries)
            and self.answered > 0
            and len(self.done) == len(self.groups)
            and all(timing.arrived for places, timing in self.shards if places)
        )

    @property
    def first_gradient(self) -> float:
        """The first gradient; where all were there before, the beginning of the push."""
        return min(self.ready.values(), default=self.opening)

    @property
    def last_gradient(self) -> float:
        """The last gradient; where all were there before, the beginning of the push."""
        return max(self.ready.values(), default=self.opening)

    def group_ready(self, number: int) -> float:
        """Return when the last gradient of a group was there."""
        moments = (self.ready[position] for position in self.groups[number] if position in self.ready)
        return max(moments, default=self.opening)

    def timelines(self, costs: Costs) -> list[Timeline]:
        """Return the moments of each group after the first gradient; costs say how long a header is on its way."""
        arrived = dict(self.done)
        for places, timing in self.shards:
            for number, place in places.items():
                if timing.left[place] >= 0:
                    arrived[number] = max(arrived[number], timing.header_arrival(costs) + timing.arrived[place])
        first = self.first_gradient
        moments = ((self.group_ready(number), self.done[number], arrived[number]) for number in range(len(self.groups)))
        return [Timeline(*(max(0.0, moment - first) for moment in each)) for each in moments]


class GradientClock:
    """Notes when each gradient of a step is ready; on a GPU that is later than when its hook runs.

    ``device`` is the GPU of all gradients; ``None`` where they are on the host, or on several GPUs, whose clocks cannot
    be compared: then a hook's moment stands for its gradient's.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._moments: dict[int, float] = {}
        self._events: dict[int, torch.cuda.Event] = {}

    def note(self, position: int) -> None:
        """Note that a gradient is ready, or, on a GPU, is when all that was launched before has been done."""
        if self._device is None:
            self._moments[position] = time.perf_counter()
            return
        event = self._events[position] = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()

    def take(self) -> dict[int, float]:
        """Return the moments by position (:func:`time.perf_counter`), and begin with the next step.

        On a GPU this waits for all launched work; call it when the gradients have been sent, so that none is left.
        """
        moments, events = self._moments, self._events
        self._moments, self._events = {}, {}
        if events:
            with torch.cuda.device(self._device):
                anchor = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                anchor.record()
                anchor.synchronize()
            now = time.perf_counter()
            moments.update({position: now - event.elapsed_time(anchor) / 1e3 for position, event in events.items()})
        return moments
