"""The first upload and a download of a large model on loopback, as an optimizer and ``psclient.download`` make them."""

import time
from pathlib import Path

import common  # beside this file
import torch

from psclient import ASGD, LocalServer, download

_TENSOR = 1 << 24
"""Elements of each tensor but the last."""

_COMPILE_SECONDS = 2.0
"""Time for the server to load its compiled loops, after the upload."""


def measure(size: int) -> dict[str, float]:
    """Upload a model of so many fp32 parameters, and download it.

    Args:
        size: parameters.
    """
    sizes = [_TENSOR] * (size // _TENSOR) + [size % _TENSOR] * (size % _TENSOR > 0)
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(elements)) for elements in sizes)
    torch.optim.SGD(model.parameters(), lr=0.1)  # torch imports a second's worth of modules with the first optimizer
    megabytes = 4 * size / 1e6
    copied = min(_copy_seconds(model) for _ in range(2))
    with LocalServer(buffers="none") as server:
        status = Path(f"/proc/{server.processes[0].pid}/status")
        empty = _peak_bytes(status)
        started = time.perf_counter()
        with ASGD(model.parameters(), lr=0.1, model=model, server=server, worker="probe"):
            uploaded = time.perf_counter() - started
            upload_peak = _peak_bytes(status) - empty
        del model
        time.sleep(_COMPILE_SECONDS)
        started = time.perf_counter()
        values = download(server.addresses)
        downloaded = time.perf_counter() - started
        assert sum(value.numel() for value in values.values()) == size
        return {
            "upload": megabytes / uploaded,
            "download": megabytes / downloaded,
            "upload_peak": upload_peak / megabytes / 1e6,
            "peak": (_peak_bytes(status) - empty) / megabytes / 1e6,
            "copy": megabytes / copied,
        }


def _copy_seconds(model: torch.nn.ParameterList) -> float:
    """Return what a copy of all tensors takes, one after the other into the same memory, on one thread."""
    torch.set_num_threads(1)
    target = torch.ones(_TENSOR)
    started = time.perf_counter()
    for parameter in model:
        target[: parameter.numel()].copy_(parameter.detach())
    return time.perf_counter() - started


def _peak_bytes(status: Path) -> int:
    """Return the largest resident set that a process has had."""
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    common.run(measure)
