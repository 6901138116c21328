"""MGS: which tensors travel together, by the merge of the MGS-SGD paper, and LAGS: a density for each layer.

Shi et al., INFOCOM 2020 and 2019 (docs/internals/merging.md). Asked for by ``merge="mgs"`` or ``density=lags()``; else
nothing of this file runs. The first steps measure this worker and its link, with groups of very different sizes,
since a cost that never varies cannot be told from the others; then the groups are made, and again now and then.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from psclient.compress.selector import Grouping, Groups, by_size
from psclient.errors import ConfigurationError
from pscore.model.layout import ModelLayout

log = logging.getLogger("psclient")

_COLD_STEPS = 2  # the first steps have no thresholds yet: they show nothing
_PROBES = 6  # steps that measure, every second one tensor by tensor
_PERIOD_STEPS = 500
_REMEMBERED = 256  # samples of a cost
_ENTRY_BYTES = 8.0  # until measured


@dataclass(frozen=True)
class LayerDensity:
    """Densities by layer (LAGS-SGD: layer-wise adaptive gradient sparsification, Shi et al., 2019).

    ::

        ρ_l = clip((slack_l − a) / (8·β·n_l), lowest, highest)

    with the backward time ahead once the layer's gradient is there (``slack_l``), and the measured start-up ``a`` of a
    message and time ``β`` of a byte; ``start`` until these are measured. An object of this class is a density for any
    sparse method; it needs ``overlap=True``, since without overlap nothing is ahead.
    """

    lowest: float = 0.001
    highest: float = 0.1
    start: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.lowest <= self.start <= self.highest <= 1:
            raise ConfigurationError(
                f"lags needs 0 < lowest ≤ start ≤ highest ≤ 1, not {self.lowest}, {self.start}, {self.highest}"
            )

    def check(self, *, overlap: bool) -> None:
        """Raise :class:`ConfigurationError` if densities by layer would mean nothing."""
        if not overlap:
            raise ConfigurationError(
                "density=lags() hides pushes behind the backward pass, and without overlap there is none left: pass "
                "overlap=True, or give a number as density"
            )

    def __call__(self, step: int) -> float:
        """Return the density of all layers before costs are measured, at any step."""
        return self.start

    def densities(
        self, slack: Sequence[float], elements: Sequence[float], costs: "Costs", entry_bytes: float = _ENTRY_BYTES
    ) -> list[float]:
        """Return ``ρ_l``; ``slack`` in seconds."""
        found = []
        for ahead, count in zip(slack, elements, strict=True):
            cost = entry_bytes * costs.byte * count
            density = (ahead - costs.message) / cost if cost > 0 else self.highest
            found.append(min(max(density, self.lowest), self.highest))
        return found


class Costs(NamedTuple):
    """Seconds, and seconds an item.

    ::

        t_s(group) = group + element·elements     selecting, encoding, handing over; one thread
        t_c(group) = message + byte·bytes         until it is whole at the server; one link
    """

    group: float = 2e-4
    element: float = 1e-9
    message: float = 1e-4
    byte: float = 1e-8


def merge(ready: Sequence[float], elements: Sequence[float], nbytes: Sequence[float], costs: Costs) -> list[int]:
    """Return where groups end, of tensors in the order in which their gradients come (MGS-SGD, section IV).

    ``ready``: when each gradient and all before it are there, in seconds. The next tensor joins the group if waiting
    for it and selecting both together takes less time than one start-up saves.
    """
    elements_before, bytes_before = ([0.0, *accumulate(each)] for each in (elements, nbytes))

    def select(start: int, end: int) -> float:
        return costs.group + costs.element * (elements_before[end] - elements_before[start])

    def send(start: int, end: int) -> float:
        size = bytes_before[end] - bytes_before[start]
        return costs.message + costs.byte * size if size else 0.0

    ends: list[int] = []
    start, selected, sent = 0, 0.0, 0.0  # of the groups that are complete
    for end in range(1, len(ready)):
        alone = max(selected, ready[end - 1]) + select(start, end)
        link_free = max(sent, alone)
        together = max(selected, ready[end]) + select(start, end + 1) - select(end, end + 1)
        saved = send(start, end) + send(end, end + 1) - send(start, end + 1)
        if together - link_free >= saved:
            ends.append(end)
            selected, sent = alone, link_free + send(start, end)
            start = end
    return [*ends, len(ready)]


@dataclass
class _Push:
    """The push that is under way; moments are of :func:`time.perf_counter`."""

    groups: Groups
    opened: float
    ready: Mapping[int, float] = field(default_factory=dict)  # when gradients were there, by position
    done: dict[int, float] = field(default_factory=dict)  # when a group was handed to the transport
    entries: dict[int, int] = field(default_factory=dict)  # that each tensor sent, by position


class MergedGradients:
    """Measures pushes, and replaces the groups of ``grouping`` between two of them; with LAGS the densities too.

    ``groups`` stay by size without ``merges``. Calls come from the threads of a step; :meth:`answered` from another one
    with overlap.
    """

    def __init__(
        self, layout: ModelLayout, grouping: Grouping, layer_density: LayerDensity | None, *, merges: bool
    ) -> None:
        self._grouping, self._layer_density, self._merges = grouping, layer_density, merges
        self._elements = [float(spec.numel) for spec in layout.parameters]
        self._by_size, self._by_tensor = grouping.groups, by_size(self._elements, 0)
        self._chosen: tuple[Groups, dict[int, float]] = grouping.groups, {}
        self._lock = threading.Lock()  # owned while what was chosen is read or replaced
        self._steps = -_COLD_STEPS
        self._push = _Push((), 0.0)
        self._selecting: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)  # elements, seconds of a group
        self._sending: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)  # bytes, seconds of a message
        self._ready, self._entries = np.zeros((2, len(self._elements)))
        self._entry_bytes = _ENTRY_BYTES

    def opened(self) -> None:
        """Note that a push begins."""
        self._push = _Push(self._grouping.groups, time.perf_counter())

    def note_gradients(self, moments: Mapping[int, float]) -> None:
        """Note when the gradients of the push were ready, by position; not called if all were ready before."""
        self._push.ready = moments

    def sent(self, number: int, entries: Mapping[int, int]) -> None:
        """Note that a group was handed to the transport, and the entries that its tensors sent."""
        self._push.done[number] = time.perf_counter()
        self._push.entries.update(entries)

    def answered(self, shards: Sequence[tuple[Mapping[int, int], Sequence[int], Sequence[float]]]) -> None:
        """Learn from a push that every shard has applied.

        ``shards`` are the places of groups in a shard's plan, and at these places bytes, and when a group was whole at
        the server, in seconds after the header was there.
        """
        push = self._push
        if len(push.done) < len(push.groups) or not all(arrivals for places, _, arrivals in shards if places):
            return  # a flush, or a push that was repeated: it shows nothing
        self._steps += 1
        at = self._steps % _PERIOD_STEPS
        if self._steps <= 0 or not 0 < at <= _PROBES:
            return
        self._learn(push, shards)
        if at == _PROBES:
            self._choose()

    def advance(self) -> None:
        """Have the next push use the groups that are due; call it between two pushes."""
        probe = (self._steps + 1) % _PERIOD_STEPS
        with self._lock:
            groups, self._grouping.densities = self._chosen
        if 0 < probe <= _PROBES:
            groups = self._by_tensor if probe % 2 else self._by_size
        self._grouping.groups = groups

    def _learn(self, push: _Push, shards: Sequence[tuple[Mapping[int, int], Sequence[int], Sequence[float]]]) -> None:
        first, before = min(push.ready.values(), default=push.opened), push.opened
        for number, done in sorted(push.done.items(), key=itemgetter(1)):
            members = [n for n in push.groups[number] if n in push.entries]
            began = max(before, *(push.ready.get(n, push.opened) for n in members), push.opened)
            self._selecting.append((sum(self._elements[n] for n in members), done - began))
            before = done
        for places, sizes, arrivals in shards:
            left = {place: push.done[number] - push.opened for number, place in places.items()}
            seen = [(arrivals[place], left[place], sizes[place]) for place in left]
            arrived_before = 0.0
            for arrived, message in groupby(sorted(seen), key=itemgetter(0)):  # its groups arrived at one moment
                _, moments, nbytes = zip(*message, strict=True)
                if 0 < max(moments) <= arrived_before:  # it stood behind the one in front of it
                    self._sending.append((sum(nbytes), arrived - arrived_before))
                arrived_before = arrived
        for position in range(len(self._elements)):
            self._ready[position] = max(0.0, push.ready.get(position, first) - first)
            self._entries[position] = push.entries.get(position, 0)
        total = sum(push.entries.values())
        if total:
            self._entry_bytes = sum(sum(sizes) for _, sizes, _ in shards) / total

    def _choose(self) -> None:
        guess = Costs()
        group, element = _line(self._selecting, guess.group, guess.element)
        message, byte = _line(self._sending, guess.message, guess.byte)
        costs, densities = Costs(group, element, message, byte), {}
        entries = self._entries
        if self._layer_density is not None:
            slack = (self._ready.max() - self._ready).tolist()
            found = self._layer_density.densities(slack, self._elements, costs, self._entry_bytes)
            densities = dict(enumerate(found))
            entries = np.array(self._elements) * found
        groups = self._by_size
        if self._merges:
            backward = slice(None, None, -1)
            ready = np.maximum.accumulate(self._ready[backward]).tolist()
            nbytes = (entries * self._entry_bytes)[backward].tolist()
            ends, count = merge(ready, self._elements[backward], nbytes, costs), len(ready)
            groups = tuple(range(count - end, count - start) for start, end in pairwise([0, *ends]))
        with self._lock:
            self._chosen = groups, densities
        log.info("%d tensors travel in %d groups, by %s", len(self._elements), len(groups), costs)


def _line(samples: Sequence[tuple[float, float]], start: float, slope: float) -> tuple[float, float]:
    """Return the least-squares line of some samples, neither coefficient negative; the given one without samples."""
    if not samples:
        return start, slope
    x, y = np.array(samples).T
    if np.ptp(x):
        slope, start = np.polyfit(x, y, 1).tolist()
    if slope < 0 or not np.ptp(x):
        return float(y.mean()), 0.0
    if start < 0:
        return 0.0, float(x @ y / (x @ x))
    return start, slope


class GradientClock:
    """Notes when each gradient of a step is ready; on a GPU that is later than when its hook runs.

    ``device`` is the GPU of all gradients; ``None`` if they are on the host, or on several GPUs, whose clocks cannot be
    compared: then a hook's moment stands for its gradient's.
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
