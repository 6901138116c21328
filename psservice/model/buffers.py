"""The server's average of a model's buffers over workers, weighted by samples (docs/reference/protocol.md)."""

import threading

import torch

from pscore.model.buffers import is_exchanged, pack, unpack
from pscore.model.layout import TensorSpec
from pscore.model.modelfile import StateDict


class BufferAverage:
    """Floating-point buffers are averaged, integer scalars take the maximum, others are constant. Thread-safe.

    A value that is not a number does not count: the average stays what it is there.

    Args:
        specs: all buffers, in layout order.
        values: their first values, one tensor a spec; without weight, so that the first contribution replaces them.
    """

    def __init__(self, specs: tuple[TensorSpec, ...], values: list[torch.Tensor]) -> None:
        self._specs = specs
        self._values = {
            spec.name: value.float() if spec.dtype in (torch.float16, torch.bfloat16) else value
            for spec, value in zip(specs, values, strict=True)
        }
        self.weight, self.contributions = 0.0, 0
        self._lock = threading.Lock()
        self.exchanged = tuple(spec for spec in specs if is_exchanged(spec))

    def contribute(self, data: bytes, samples: int, live_workers: int) -> None:
        """Average one worker's packed buffers in; ``live_workers`` is the length of the average."""
        incoming = unpack(data, self.exchanged)
        with self._lock:
            self.contributions += 1
            self.weight = (1 - 1 / max(1, live_workers)) * self.weight + samples
            share = samples / self.weight if self.weight else 0.0
            for spec, value in zip(self.exchanged, incoming, strict=True):
                mine = self._values[spec.name]
                if spec.dtype.is_floating_point:
                    value = value.to(mine.dtype)
                    mean = torch.lerp(mine, value, share)
                    # An infinity (a mask, say) has no mean: there the latest contribution stands.
                    mean = torch.where(mean.isfinite(), mean, value)
                    self._values[spec.name] = torch.where(value.isnan(), mine, mean)
                else:
                    self._values[spec.name] = torch.maximum(mine, value)

    def replace(self, data: bytes) -> None:
        """Take other values of all buffers, packed in their own dtypes, in place of the average."""
        values = unpack(data, self._specs)
        with self._lock:
            self.contributions += 1
            for spec, value in zip(self._specs, values, strict=True):
                self._values[spec.name] = value.to(self._values[spec.name].dtype)

    def export(self) -> tuple[float, StateDict]:
        """Return the weight, and copies of the values by name as they are kept: more exact than in their own dtypes."""
        with self._lock:
            return self.weight, {name: value.clone() for name, value in self._values.items()}

    def packed(self) -> bytes:
        """Return the exchanged buffers, packed in their own dtypes."""
        state = self.state()
        return pack(state[spec.name] for spec in self.exchanged)

    def state(self) -> StateDict:
        """Return every buffer by name, in its own dtype."""
        with self._lock:
            return {spec.name: self._values[spec.name].to(spec.dtype) for spec in self._specs}
