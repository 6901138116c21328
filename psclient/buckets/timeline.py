"""When gradients are ready, on this process's clock; on a GPU that is later than when their hooks run."""

import time

import torch


class GradientMoments:
    """Notes when each gradient of a step is ready.

    Args:
        device: the GPU that all gradients are on; ``None`` where they are on the host, or on several GPUs, whose clocks
            cannot be compared: then a hook's moment stands for its gradient's.
    """

    def __init__(self, device: torch.device | None) -> None:
        """Begin with a step."""
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

        On a GPU this waits for what was launched; call it when the gradients have been sent, so that nothing is left.
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
