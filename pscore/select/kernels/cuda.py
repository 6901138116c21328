"""Selection on a GPU without waiting for it, at a threshold that stays on the device.

A step launches one pass that accumulates and sifts at the threshold of the step before, a few corrections that return
at once where that was good enough, and one pass over the hits (docs/kernels.md).
"""

import math
from collections.abc import MutableMapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from pscore.select.kernels.base import GradientUpdate, Taken
from pscore.select.kernels.side_stream import SideStream

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
    """The layout of a selection's output in one int32 tensor, so that one copy brings all of it to the host."""

    capacity: int

    @property
    def words(self) -> int:
        """Length of that tensor."""
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
    """A selection that is under way.

    Attributes:
        k: entries asked for.
        count: entries taken. This and the following are known after :meth:`collect`.
        hits: entries above the threshold; where there are more than ``count``, the rest stayed for lack of capacity.
        passes: sifts that were needed: 1 where the warm threshold was good enough.
        threshold: the magnitude above which entries were taken.
    """

    count: int
    hits: int
    passes: int
    threshold: float

    def __init__(self, k: int, output: _Output, packed: torch.Tensor, stream: SideStream) -> None:
        """Start the copy to the host; the side stream must be entered."""
        self.k = k
        self._output = output
        self._packed = packed
        self._stream = stream
        self._host, self._copied = stream.copy_to_host(packed)

    def collect(self) -> Taken:
        """Wait for this selection, and nothing that was launched after it; return the entries on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        whole, real, _, _ = self._output.parts(self._host)
        self.hits, self.count, self.passes = int(whole[_HITS]), int(whole[_EMITTED]), int(whole[_PASSES])
        self.threshold = float(real[_THRESHOLD])
        return self._cut(self._host)

    def on_device(self) -> Taken:
        """Return the entries on the device, for the current stream; call :meth:`collect` first."""
        return self._cut(self._stream.share(self._packed))

    def _cut(self, packed: torch.Tensor) -> Taken:
        # Copies, because the packed tensor is as long as the capacity, and on the host it is pinned.
        _, _, offsets, values = self._output.parts(packed)
        return Taken(offsets[: self.count].to(torch.int64), values[: self.count].clone())


class DeviceSelection:
    """Takes the largest entries out of tensors of one device, in a side stream.

    The calls return before anything has run. Until :meth:`PendingTaken.collect` has returned, no other code may write
    the tensors of the call, nor read those that it changes; they may be freed.

    A tensor's ``state`` has ``threshold``, an fp32 scalar on the device, and ``turn``, a number. Both may be saved with
    the optimizer's state; without them a tensor starts cold.

    Args:
        device: a CUDA device; under Triton's interpreter the CPU.
        tolerance: how far, as a share of ``k``, the number of hits may be off before it is corrected.
        corrections: how many sifts may follow the first one.
        cold_corrections: the same for a cold start.
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
        from pscore.select.kernels import triton_kernels

        self._kernels: Any = triton_kernels  # Triton's launchers have no types
        self._device = device
        self._stream = SideStream(device)
        self._tolerance = tolerance
        self._corrections = corrections
        self._cold_corrections = cold_corrections
        self._block = block

    def take(
        self,
        memory: torch.Tensor,
        added: GradientUpdate | None,
        k: int,
        keep: float,
        state: MutableMapping[str, Any],
        masked: torch.Tensor | None = None,
    ) -> PendingTaken:
        """Accumulate, take about the ``k`` largest entries, and leave ``keep·value`` where one was taken.

        Args:
            memory: fp32 ``[n]``, contiguous.
            added: the update that is added first; ``None`` for none.
            k: entries wanted, at least 1. With ``k ≥ n`` every non-zero is taken; otherwise at most ``⌈1.25·k⌉``.
            keep: factor of an entry that is taken and stays.
            state: of this memory.
            masked: fp32 ``[n]``, becomes 0 where an entry is taken.
        """
        return self._select(memory, None, added, keep, masked, k, state)

    def take_difference(
        self, a: torch.Tensor, b: torch.Tensor, k: int, state: MutableMapping[str, Any]
    ) -> PendingTaken:
        """Find about the ``k`` largest entries of ``a − b``, fp32 ``[n]`` both; nothing is written to either."""
        return self._select(a, b, None, 0.0, None, k, state)

    def _select(
        self,
        a: torch.Tensor,
        b: torch.Tensor | None,
        added: GradientUpdate | None,
        keep: float,
        masked: torch.Tensor | None,
        k: int,
        state: MutableMapping[str, Any],
    ) -> PendingTaken:
        """Launch every pass. Scratch tensors go back to the side stream's memory, which keeps them in order."""
        n = a.numel()
        if not 0 < n < LARGEST or k < 1:
            raise ValueError(f"{k} of {n} elements: at least 1, of a tensor with fewer than {LARGEST}")
        update = () if added is None else (added.gradient, added.parameters, added.momentum)
        with self._stream.entered(a, b, masked, *update, state.get("threshold")):
            if k < n:
                start, corrections, turn = self._start(state)
            else:
                start, corrections, turn = self._zero(), 0, 0.0
            output = _Output(min(n, math.ceil(1.25 * k)))
            packed = torch.empty(output.words, dtype=torch.int32, device=self._device)
            whole, real, offsets, values = output.parts(packed)
            blocks = -(-n // self._block)
            slot = _slot(self._block, min(k, n) / n)
            counts, places = torch.empty((2, blocks), dtype=torch.int32, device=self._device)
            excess, peaks = torch.empty((2, blocks), dtype=torch.float32, device=self._device)
            slot_offsets = torch.empty(blocks * slot, dtype=torch.int32, device=self._device)
            slot_values = torch.empty(blocks * slot, dtype=torch.float32, device=self._device)
            found = (counts, excess, peaks, slot_offsets, slot_values)
            shape = {"BLOCK": self._block, "SLOT": slot, "num_warps": 8, "enable_fp_fusion": False}
            for sift in range(1 + corrections):
                opening = sift == 0
                if opening and added is not None:  # floats: an int argument would compile another kernel
                    self._kernels.accumulate_and_sift[(blocks,)](
                        a, added.gradient, added.parameters, added.momentum,
                        float(added.scale), float(added.decay), float(added.factor), start, *found, n, **shape,
                    )  # fmt: skip
                else:
                    self._kernels.sift[(blocks,)](a, b, start, whole, real, *found, n, OPENING=opening, **shape)
                self._kernels.settle[(1,)](
                    start, whole, real, counts, excess, peaks, places, blocks, min(k, n), output.capacity,
                    self._tolerance, turn, OPENING=opening, REMAINING=corrections - sift, TILE=_TILE,
                )  # fmt: skip
            self._kernels.emit[(blocks,)](
                a, b, whole, real, counts, places, slot_offsets, slot_values, offsets, values,
                a if b is None else None, masked, float(keep), n, **shape,
            )  # fmt: skip
            return PendingTaken(k, output, packed, self._stream)

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float32, device=self._device)

    def _start(self, state: MutableMapping[str, Any]) -> tuple[torch.Tensor, int, float]:
        """Return the threshold of the first sift, how many may follow it, and where filling starts if room is short.

        The threshold is left where the next step starts; the third is a share of the hits. A cold start is a sift at 0:
        its mean excess is the mean magnitude, and the tail secant goes on from there.
        """
        cold = "threshold" not in state
        if cold:
            state["threshold"] = self._zero()
        state["turn"] = state.get("turn", 0) + 1
        corrections = self._cold_corrections if cold else self._corrections
        return state["threshold"], corrections, state["turn"] * _TURN % 1.0


def _slot(block: int, density: float) -> int:
    """Return how many hits a block's slot holds: four times what is expected, and room for chance; a power of two."""
    wanted = min(block, 64 + math.ceil(4 * density * block))
    return 1 << (wanted - 1).bit_length()
