"""Selection on a GPU without waiting for it: the threshold stays on the device and is warm from the step before.

A step launches one pass that accumulates and sifts at the threshold of the step before, a few corrections that return
at once where that was good enough, and one pass over the hits. The host learns what was taken when it collects it.
``docs/kernels.md`` counts the bytes.
"""

import math
from collections.abc import MutableMapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from pscore.select.kernels.base import GradientUpdate, Taken
from pscore.select.kernels.side_stream import AsyncCopy, Lane

LARGEST = 1 << 30
"""A tensor has fewer elements than this."""

_HEADER = 8  # words of int32, then as many of fp32; which is which stands in triton_kernels
_HITS, _EMITTED, _PASSES, _THRESHOLD = 1, 2, 4, 0
_TURN = (math.sqrt(5) - 1) / 2  # multiples of it, modulo 1, spread evenly however many there are
_TILE = 2048


def available() -> bool:
    """Tell whether Triton is installed."""
    return find_spec("triton") is not None


class _Output(NamedTuple):
    """How a selection's output lies in one int32 tensor, so that one copy takes all of it to the host."""

    capacity: int

    @property
    def words(self) -> int:
        """How long that tensor is."""
        return 2 * _HEADER + 2 * self._room

    def parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the header's int32 and fp32 parts, the offsets and the values."""
        whole, real = packed[:_HEADER], packed[_HEADER : 2 * _HEADER]
        offsets, values = packed[2 * _HEADER :].view(2, self._room)
        return whole, real.view(torch.float32), offsets, values.view(torch.float32)

    @property
    def _room(self) -> int:
        return -(-self.capacity // 4) * 4  # 16 bytes: Triton compiles one kernel for aligned and another for the rest


class PendingTaken:
    """What a selection will have taken, once :meth:`collect` has waited for it.

    Attributes:
        k: entries asked for.
        count: entries taken. This and what follows is known after :meth:`collect`.
        hits: entries above the threshold; more than ``count`` if capacity was short, and then the rest stayed.
        passes: sifts that were needed: 1 where the warm threshold was good enough.
        threshold: the magnitude above which entries were taken.
    """

    count: int
    hits: int
    passes: int
    threshold: float

    def __init__(self, k: int, output: _Output, packed: torch.Tensor, landing: AsyncCopy, lane: Lane) -> None:
        """Take the output on the device and its copy under way."""
        self.k = k
        self._output = output
        self._packed = packed
        self._landing = landing
        self._lane = lane

    def collect(self) -> Taken:
        """Wait for this selection alone and return what was taken, on the host."""
        host = self._landing.wait()
        whole, real, _, _ = self._output.parts(host)
        self.hits, self.count, self.passes = int(whole[_HITS]), int(whole[_EMITTED]), int(whole[_PASSES])
        self.threshold = float(real[_THRESHOLD])
        return self._cut(host)

    def on_device(self) -> Taken:
        """Return the same on the device, for the current stream; call :meth:`collect` first."""
        return self._cut(self._lane.lend(self._packed))

    def _cut(self, packed: torch.Tensor) -> Taken:
        # Copies, because the packed tensor is as long as the capacity, and on the host it is pinned.
        _, _, offsets, values = self._output.parts(packed)
        return Taken(offsets[: self.count].to(torch.int64), values[: self.count].clone())


class _Job(NamedTuple):
    """What to select from, and what becomes of it.

    Attributes:
        a: fp32 ``[n]``.
        b: what is subtracted from ``a`` first, if anything.
        feed: what is added to ``a`` first, if anything.
        rewritten: where ``keep·value`` is left; ``None``: nowhere.
        keep: what is left of an entry.
        masked: set to zero where an entry is taken, if anything.
    """

    a: torch.Tensor
    b: torch.Tensor | None = None
    feed: GradientUpdate | None = None
    rewritten: torch.Tensor | None = None
    keep: float = 0.0
    masked: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor | None]:
        """Everything that is read or written."""
        fed = [] if self.feed is None else [self.feed.gradient, self.feed.parameters, self.feed.momentum]
        return [self.a, self.b, self.masked, *fed]


class _Start(NamedTuple):
    """Where the search starts.

    Attributes:
        threshold: fp32 scalar on the device; it is left where the next step starts.
        corrections: how many sifts may follow the first.
        turn: where filling starts if capacity is short, as a share of the hits.
    """

    threshold: torch.Tensor
    corrections: int
    turn: float


class DeviceSelection:
    """Takes the largest entries out of tensors of one device, in a side stream.

    The calls return before anything has run. Until :meth:`PendingTaken.collect` has returned, nobody else may write
    the tensors handed in, nor read what is changed in them; they may be freed.

    What is remembered of a tensor lies in the ``state`` handed in with it: ``threshold``, an fp32 scalar on the device,
    and ``turn``, a number. Both may be saved with the optimizer's state; without them a tensor starts cold.

    Args:
        device: a CUDA device; under Triton's interpreter the CPU.
        tolerance: how far, as a share of ``k``, the number of hits may be off before it is corrected.
        corrections: how many sifts may follow the first one.
        cold_corrections: the same for a tensor of which nothing is remembered.
        block: elements a program works on; a power of two.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        tolerance: float = 0.1,
        corrections: int = 3,
        cold_corrections: int = 6,
        block: int = 4096,
    ) -> None:
        """Load the kernels and open the side stream."""
        from pscore.select.kernels import triton_kernels

        self._kernels = triton_kernels
        self._device = device
        self._lane = Lane(device)
        self._tolerance = tolerance
        self._corrections = corrections
        self._cold_corrections = cold_corrections
        self._block = block

    def take(
        self,
        memory: torch.Tensor,
        feed: GradientUpdate | None,
        k: int,
        keep: float,
        state: MutableMapping[str, Any],
        masked: torch.Tensor | None = None,
    ) -> PendingTaken:
        """Accumulate ``feed``, take about the ``k`` largest entries, and leave ``keep·value`` where one was taken.

        Args:
            memory: fp32 ``[n]``, contiguous.
            feed: what is added first; ``None``: nothing.
            k: entries wanted, at least 1. With ``k ≥ n`` every non-zero goes; otherwise at most ``⌈1.25·k⌉``.
            keep: what is left of an entry that was taken.
            state: what is remembered of this memory.
            masked: fp32 ``[n]``, becomes 0 where an entry is taken.
        """
        return self._select(_Job(memory, None, feed, memory, keep, masked), k, state)

    def take_difference(
        self, a: torch.Tensor, b: torch.Tensor, k: int, state: MutableMapping[str, Any]
    ) -> PendingTaken:
        """Find about the ``k`` largest entries of ``a − b``, fp32 ``[n]`` both; nothing is written to either."""
        return self._select(_Job(a, b), k, state)

    def _select(self, job: _Job, k: int, state: MutableMapping[str, Any]) -> PendingTaken:
        n = job.a.numel()
        if not 0 < n < LARGEST or k < 1:
            raise ValueError(f"{k} of {n} elements: at least 1, of a tensor with fewer than {LARGEST}")
        output = _Output(min(n, math.ceil(1.25 * k)))
        with self._lane.entered(*job.tensors, state.get("threshold")):
            start = self._start(state) if k < n else _Start(self._zero(), 0, 0.0)
            packed = torch.empty(output.words, dtype=torch.int32, device=self._device)
            self._launch(job, min(k, n), start, output, packed)
            landing = self._lane.land(packed)
        return PendingTaken(k, output, packed, landing, self._lane)

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float32, device=self._device)

    def _start(self, state: MutableMapping[str, Any]) -> _Start:
        # A cold start is a sift at 0: it finds the mean magnitude, and the tail secant goes on from there.
        cold = "threshold" not in state
        if cold:
            state["threshold"] = self._zero()
        state["turn"] = state.get("turn", 0) + 1
        corrections = self._cold_corrections if cold else self._corrections
        return _Start(state["threshold"], corrections, state["turn"] * _TURN % 1.0)

    def _launch(self, job: _Job, k: int, start: _Start, output: _Output, packed: torch.Tensor) -> None:
        """Launch every pass. Scratch tensors go back to this stream's memory at the end, which keeps them in order."""
        kernels: Any = self._kernels  # Triton's launchers have no types; an int argument would compile another kernel
        n, feed = job.a.numel(), job.feed
        blocks = -(-n // self._block)
        slot = _slot(self._block, k / n)
        counts, places = torch.empty((2, blocks), dtype=torch.int32, device=self._device)
        excess, peaks = torch.empty((2, blocks), dtype=torch.float32, device=self._device)
        slot_offsets = torch.empty(blocks * slot, dtype=torch.int32, device=self._device)
        slot_values = torch.empty(blocks * slot, dtype=torch.float32, device=self._device)
        whole, real, offsets, values = output.parts(packed)
        found = (counts, excess, peaks, slot_offsets, slot_values)
        shape = {"BLOCK": self._block, "SLOT": slot, "num_warps": 8, "enable_fp_fusion": False}

        def sift(opening: bool) -> None:
            kernels.sift[(blocks,)](job.a, job.b, start.threshold, whole, real, *found, n, OPENING=opening, **shape)

        def settle(opening: bool, remaining: int) -> None:
            kernels.settle[(1,)](
                start.threshold, whole, real, counts, excess, peaks, places, blocks, k, output.capacity,
                self._tolerance, start.turn, OPENING=opening, REMAINING=remaining, TILE=_TILE,
            )  # fmt: skip

        if feed is None:
            sift(opening=True)
        else:
            kernels.accumulate_and_sift[(blocks,)](
                job.a, feed.gradient, feed.parameters, feed.momentum,
                float(feed.scale), float(feed.decay), float(feed.factor),
                start.threshold, *found, n, **shape,
            )  # fmt: skip
        settle(opening=True, remaining=start.corrections)
        for remaining in reversed(range(start.corrections)):
            sift(opening=False)
            settle(opening=False, remaining=remaining)
        kernels.emit[(blocks,)](
            job.a, job.b, whole, real, counts, places, slot_offsets, slot_values, offsets, values,
            job.rewritten, job.masked, float(job.keep), n, **shape,
        )  # fmt: skip


def _slot(block: int, density: float) -> int:
    """Return how many hits a block's slot holds: four times what is expected, and room for chance; a power of two."""
    wanted = min(block, 64 + math.ceil(4 * density * block))
    return 1 << (wanted - 1).bit_length()
