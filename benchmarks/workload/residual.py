"""One tensor's residual, from which the library selects as a worker does: what a step of DGS on one tensor costs."""

import numpy as np
import torch

from pscore.selection import SelectFunction, SelectorState
from pscore.selection.cuda import device_kernels
from pscore.selection.cuda.segments import DeviceSegments
from pscore.selection.host.segments import NOTHING, HostSegments


class Residual:
    """Adds a step's gradient to a memory (fp32 ``[n]``, changed in place), and takes ``k`` entries out of it.

    On the host by a selector, ``None`` for the default's rule; on a CUDA device by that rule.
    """

    def __init__(self, memory: torch.Tensor, k: int, selector: SelectFunction | None, keep: float) -> None:
        n, self._memory, self._selector = memory.numel(), memory, selector
        self._state: SelectorState = {}
        kernels = device_kernels(memory.device)
        self._device = None if kernels is None else DeviceSegments(kernels, np.array([n]), np.zeros(1, np.int64))
        self._host = HostSegments(np.array([n]))
        self._rows = self._host.rows if self._device is None else self._device.rows
        self._rows["keep"], self._rows["searched"] = keep, k < n
        (self._device or self._host).want(np.array([k]))

    def step(self, gradient: torch.Tensor, scale: float, theta: torch.Tensor | None = None, decay: float = 0.0) -> int:
        """Add ``scale·g + decay·θ``, and select; :attr:`taken` has offsets and values. Returns their number."""
        rows = self._rows
        rows["gradient"], rows["scale"], rows["decay"] = gradient.data_ptr(), scale, decay
        rows["parameters"] = 0 if theta is None else theta.data_ptr()
        states = {0: self._state} if rows["searched"][0] else {}
        if self._device is None:
            found = self._host.select(1.0, self._memory.numpy(), NOTHING, states, self._selector)
            offsets = np.arange(found.values.size) if found.offsets is None else found.offsets
            values = found.values
        else:
            rows["memory"] = self._memory.data_ptr()
            rows["aligned"] = (rows["memory"] | rows["gradient"] | rows["parameters"]) % 16 == 0
            self._device.launch(1.0, states)
            offsets, values, _ = self._device.collect([self._memory], {})
        self.taken = torch.from_numpy(offsets), torch.from_numpy(values)
        return int(values.size)
