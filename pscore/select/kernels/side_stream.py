"""Work beside the training stream: a side stream of a CUDA device, and copies to the host that are waited for late."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class AsyncCopy:
    """A tensor on its way to the host."""

    def __init__(self, host: torch.Tensor, arrived: torch.cuda.Event | None) -> None:
        """Take the tensor that is being filled, and the event after it; ``None``: it is there."""
        self._host = host
        self._arrived = arrived

    def wait(self) -> torch.Tensor:
        """Wait for this copy, and nothing that was launched after it; return the host tensor."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host


class Lane:
    """Where kernels run beside training.

    On CUDA a stream of its own: work launched in it follows what the current stream holds at that moment, and then
    runs while that stream goes on. On any other device there is one order of work, and this does nothing.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        """Open the stream."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def entered(self, *used: torch.Tensor | None) -> Iterator[None]:
        """Launch in this lane, after all that the current stream holds.

        Args:
            *used: tensors of the current stream that the lane reads or writes. Their memory is not given to others
                before the lane is done with it, even if they are freed at once.
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

    def land(self, tensor: torch.Tensor) -> AsyncCopy:
        """Start copying a tensor of this lane to pinned memory; call it inside :meth:`entered`."""
        if self._stream is None:
            return AsyncCopy(tensor.clone(), None)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return AsyncCopy(host, self._stream.record_event())

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a finished tensor of this lane for use on the current stream, its memory kept until that is done."""
        if self._stream is not None:
            tensor.record_stream(torch.cuda.current_stream(self._stream.device))
        return tensor
