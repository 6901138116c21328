"""Selection on a GPU without waiting for it, at a threshold that stays on the device.

A step launches one pass that accumulates and sifts at the threshold of the step before, a few corrections that return
at once where that was good enough, and one pass over the hits (docs/kernels.md).
"""

import math
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from pscore.select.kernels.base import GradientUpdate, Taken

LARGEST = 1 << 30
"""A tensor has fewer elements than this."""

CORRECTIONS = 3
"""How many sifts may follow the first one of a step."""

_COLD_CORRECTIONS = 6
_TOLERANCE = 0.1  # share of k by which the number of hits may be off before it is corrected
_HEADER = 8  # words of int32, then as many of fp32; which is which stands in triton_kernels
_HITS, _EMITTED, _PASSES, _THRESHOLD = 1, 2, 4, 0
_TURN = (math.sqrt(5) - 1) / 2  # multiples of it, modulo 1, spread evenly however many there are
_TILE = 2048
_NO_UPDATE = (None, None, None, 0.0, 0.0, 0.0)


def available() -> bool:
    """Tell whether Triton is installed."""
    return find_spec("triton") is not None


class SideStream:
    """A stream of its own on CUDA; on any other device there is one order of work, and this does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def entered(self, *used: torch.Tensor | None) -> Iterator[None]:
        """Launch in this stream, after the work that the current stream has now; that stream goes on meanwhile.

        The memory of ``used``, tensors of the current stream that are read or written here, is not reused before this
        stream is done with it, even if they are freed at once.
        """
        if self._stream is None:
            yield
            return
        for tensor in used:
            if tensor is not None:
                tensor.record_stream(self._stream)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def copy_to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Start copying a tensor of this stream to pinned memory; call it inside :meth:`entered`.

        Returns:
            The host tensor, and the event after which it is complete; ``None`` where it is.
        """
        if self._stream is None:
            return tensor.clone(), None
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return host, self._stream.record_event()

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a finished tensor of this stream for the current one; its memory is kept until that is done."""
        if self._stream is not None:
            tensor.record_stream(torch.cuda.current_stream(self._stream.device))
        return tensor


def _parts(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return int32 and fp32 header, offsets and values of an output; in one tensor, one copy brings all to the host."""
    whole, real = packed[:_HEADER], packed[_HEADER : 2 * _HEADER]
    offsets, values = packed[2 * _HEADER :].view(2, -1)
    return whole, real.view(torch.float32), offsets, values.view(torch.float32)


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

    def __init__(self, k: int, packed: torch.Tensor, stream: SideStream) -> None:
        """Start the copy to the host; the side stream must be entered."""
        self.k = k
        self._packed = packed
        self._stream = stream
        self._host, self._copied = stream.copy_to_host(packed)

    def collect(self) -> Taken:
        """Wait for this selection, and nothing that was launched after it; return the entries on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        whole, real, _, _ = _parts(self._host)
        self.hits, self.count, self.passes = int(whole[_HITS]), int(whole[_EMITTED]), int(whole[_PASSES])
        self.threshold = float(real[_THRESHOLD])
        return self._cut(self._host)

    def on_device(self) -> Taken:
        """Return the entries on the device, for the current stream; call :meth:`collect` first."""
        return self._cut(self._stream.share(self._packed))

    def _cut(self, packed: torch.Tensor) -> Taken:
        # Copies, because the packed tensor is as long as the capacity, and on the host it is pinned.
        _, _, offsets, values = _parts(packed)
        return Taken(offsets[: self.count].to(torch.int64), values[: self.count].clone())


class DeviceSelection:
    """Takes the largest entries out of tensors of one device, in a side stream.

    The calls return before anything has run. Until :meth:`PendingTaken.collect` has returned, no other code may write
    the tensors of the call, nor read those that it changes; they may be freed.

    A tensor's ``state`` has ``threshold``, an fp32 scalar on the device, and ``turn``, a number. Both may be saved with
    the optimizer's state; without them a tensor starts cold.

    Args:
        device: a CUDA device; under Triton's interpreter the CPU.
        block: elements a program works on; a power of two.
    """

    def __init__(self, device: torch.device, *, block: int = 4096) -> None:
        from pscore.select.kernels import triton_kernels

        self._kernels: Any = triton_kernels  # Triton's launchers have no types
        self._device = device
        self._stream = SideStream(device)
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

        Scratch tensors go back to the side stream's memory, which keeps them in order.

        Args:
            memory: fp32 ``[n]``, contiguous.
            added: the update that is added first; ``None`` for none.
            k: entries wanted, at least 1. With ``k ≥ n`` every non-zero is taken; otherwise at most ``⌈1.25·k⌉``.
            keep: factor of an entry that is taken and stays.
            state: of this memory.
            masked: fp32 ``[n]``, becomes 0 where an entry is taken.
        """
        n = memory.numel()
        if not 0 < n < LARGEST or k < 1:
            raise ValueError(f"{k} of {n} elements: at least 1, of a tensor with fewer than {LARGEST}")
        update = _NO_UPDATE if added is None else _arguments(added)
        with self._stream.entered(memory, masked, *update[:3], state.get("threshold")):
            if k < n:
                start, corrections, turn = self._start(state)
            else:
                start, corrections, turn = self._empty(1, torch.float32).zero_(), 0, 0.0
            capacity = min(n, math.ceil(1.25 * k))
            # Multiples of 16 bytes: Triton compiles one kernel for aligned memory and another for the rest.
            packed = self._empty(2 * _HEADER + 2 * (-(-capacity // 4) * 4), torch.int32)
            whole, real, offsets, values = _parts(packed)
            blocks = -(-n // self._block)
            slot = _slot(self._block, min(k, n) / n)
            counts, places = self._empty((2, blocks), torch.int32)
            excess, peaks = self._empty((2, blocks), torch.float32)
            slot_offsets = self._empty(blocks * slot, torch.int32)
            slot_values = self._empty(blocks * slot, torch.float32)
            found = (counts, excess, peaks, slot_offsets, slot_values)
            shape = {"BLOCK": self._block, "SLOT": slot, "num_warps": 8, "enable_fp_fusion": False}
            for sift in range(1 + corrections):
                opening = sift == 0
                self._kernels.sift[(blocks,)](
                    memory, *(update if opening else _NO_UPDATE),
                    start, whole, real, *found, n, OPENING=opening, **shape,
                )  # fmt: skip
                self._kernels.settle[(1,)](
                    start, whole, real, counts, excess, peaks, places, blocks, min(k, n), capacity,
                    _TOLERANCE, turn, OPENING=opening, REMAINING=corrections - sift, TILE=_TILE,
                )  # fmt: skip
            self._kernels.emit[(blocks,)](
                memory, whole, real, counts, places, slot_offsets, slot_values, offsets, values, masked, float(keep), n,
                **shape,
            )  # fmt: skip
            return PendingTaken(k, packed, self._stream)

    def _empty(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _start(self, state: MutableMapping[str, Any]) -> tuple[torch.Tensor, int, float]:
        """Return the threshold of the first sift, how many may follow it, and where filling starts if room is short.

        The threshold is left where the next step starts; the third is a share of the hits. A cold start is a sift at 0:
        its mean excess is the mean magnitude, and the tail secant goes on from there.
        """
        cold = "threshold" not in state
        if cold:
            state["threshold"] = torch.zeros((), dtype=torch.float32, device=self._device)
        state["turn"] = state.get("turn", 0) + 1
        corrections = _COLD_CORRECTIONS if cold else CORRECTIONS
        return state["threshold"], corrections, state["turn"] * _TURN % 1.0


def _arguments(added: GradientUpdate) -> tuple[Any, ...]:
    factors = added.scale, added.decay, added.factor  # floats: an int argument would compile another kernel
    return added.gradient, added.parameters, added.momentum, *map(float, factors)


def _slot(block: int, density: float) -> int:
    """Return the room of a block's slot: four times the expected hits, and room for chance; a power of two."""
    wanted = min(block, 64 + math.ceil(4 * density * block))
    return 1 << (wanted - 1).bit_length()
