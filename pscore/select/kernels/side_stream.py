"""Work beside the training stream of a CUDA device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A stream of its own on CUDA; on any other device there is one order of work, and this does nothing.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def entered(self, *used: torch.Tensor | None) -> Iterator[None]:
        """Launch in this stream, after the work that the current stream has now; that stream goes on meanwhile.

        Args:
            *used: tensors of the current stream that are read or written here. Their memory is not reused before this
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
