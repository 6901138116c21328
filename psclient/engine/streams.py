"""CUDA streams: a thread that works for another one launches in that thread's streams."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from psclient.errors import ConfigurationError


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """Return the CUDA devices that tensors lie on."""
    return [device for device in dict.fromkeys(tensor.device for tensor in tensors) if device.type == "cuda"]


def current_streams(devices: Sequence[torch.device]) -> list[torch.cuda.Stream]:
    """Return the calling thread's streams of some devices, and last that of its current device.

    Raises:
        ConfigurationError: a CUDA graph is being captured.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    if torch.cuda.is_current_stream_capturing():
        raise ConfigurationError(
            "a CUDA graph cannot contain a push or a pull: these wait for a server. Capture forward and backward "
            "without step(), with overlap=False, and call step() after each replay of the graph"
        )
    return [torch.cuda.current_stream(device) for device in (*devices, None)]


@contextmanager
def entered(streams: Iterable[torch.cuda.Stream]) -> Iterator[None]:
    """Launch in these streams, one a device; the last one's device is the current one."""
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        yield
