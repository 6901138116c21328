"""``psservice`` in which something fails while a file exists: ``python -m tests.faults FAULT FILE serve …``.

What fails is torch or the system below the server, and nothing of the server's own, so that tests outlive its insides.

``half-step``: ``torch.optim.SGD`` steps the first of its tensors and then has no memory.
``poison``: it does likewise, with a TypeError, at each step in which a gradient is 2.
``device``: no tensor can be copied, as after an error of a GPU.
``slow-snapshots``, ``slow-journal``: ``fsync`` of files in those directories does not return; that one waits is told by
a file ``.met`` beside.
``stalled-journal``: likewise, writes to files in that directory do not return.
``EIO-journal``, ``ENOSPC-journal``: ``fsync`` of files in that directory fails with that error.
``held-model``: a file ``final.safetensors`` does not get its name; that one waits is told by a file ``.met`` beside.
``no-listing``: from the moment when a snapshot gets its name, no descriptor is left to list the snapshots with.
"""

import errno
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

_POLL_SECONDS = 0.01


def spawner(fault: str, file: Path) -> Callable[[Sequence[str], int, IO[str] | None], "subprocess.Popen[bytes]"]:
    """Return what stands in for ``psclient.rpc.local_server.spawn``."""

    def spawn(flags: Sequence[str], ready_fd: int, log_to: IO[str] | None) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", "tests.faults", fault, str(file), "serve", *flags],
            pass_fds=(ready_fd,),
            stdin=subprocess.DEVNULL,
            stderr=log_to,
            start_new_session=True,
            cwd=Path(__file__).parents[1],
        )

    return spawn


def _half_step(file: Path, error: Exception, gradient: float | None = None) -> None:
    import torch

    real = torch.optim.SGD.step

    def step(self: Any, closure: Any = None) -> Any:
        tensors = list(itertools.chain.from_iterable(group["params"] for group in self.param_groups))
        if len(tensors) == 1 or not file.exists():
            return real(self, closure)
        if gradient is not None and not any(gradient in tensor.grad for tensor in tensors if tensor.grad is not None):
            return real(self, closure)
        for tensor in tensors[1:]:
            tensor.grad = None
        real(self, closure)
        raise error

    torch.optim.SGD.step = step  # type: ignore[method-assign]


def _device(file: Path) -> None:
    import torch

    real = torch.Tensor.clone

    def clone(self: Any, **options: Any) -> Any:
        if file.exists():
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return real(self, **options)

    torch.Tensor.clone = clone  # type: ignore[method-assign]


def _slow(directory: str, file: Path, names: Sequence[str] = ("fsync", "fdatasync")) -> None:
    for name in names:
        there = getattr(os, name)

        def called(descriptor: int, *arguments: Any, real: Callable[..., Any] = there) -> Any:
            while directory in os.readlink(f"/proc/self/fd/{descriptor}") and file.exists():
                file.with_suffix(".met").touch()
                time.sleep(_POLL_SECONDS)
            return real(descriptor, *arguments)

        setattr(os, name, called)


def _failed_sync(error: int, directory: str, file: Path) -> None:
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)

        def sync(descriptor: int, real: Callable[[int], None] = real) -> None:
            if file.exists() and directory in os.readlink(f"/proc/self/fd/{descriptor}"):
                raise OSError(error, os.strerror(error))
            real(descriptor)

        setattr(os, name, sync)


def _held_model(file: Path) -> None:
    for name in ("rename", "replace"):
        there = getattr(os, name)

        def renamed(source: Any, target: Any, real: Callable[..., None] = there, **options: Any) -> None:
            while Path(target).name == "final.safetensors" and file.exists():
                file.with_suffix(".met").touch()
                time.sleep(_POLL_SECONDS)
            real(source, target, **options)

        setattr(os, name, renamed)


def _no_listing(file: Path) -> None:
    named = False
    rename = os.rename

    def renamed(source: Any, target: Any, **options: Any) -> None:
        nonlocal named
        rename(source, target, **options)
        named = named or (file.exists() and not Path(target).name.startswith("."))

    os.rename = renamed
    for name in ("listdir", "scandir"):
        there = getattr(os, name)

        def listed(path: Any = ".", real: Callable[[Any], Any] = there) -> Any:
            if named and file.exists() and Path(path).name == "snapshots":
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
            return real(path)

        setattr(os, name, listed)


def main() -> int:
    """Set the fault up, then become the server."""
    fault, file = sys.argv[1], Path(sys.argv[2])
    if fault == "half-step":
        _half_step(file, MemoryError("no memory for the rest of the step"))
    elif fault == "poison":
        _half_step(file, TypeError("this step cannot be done"), gradient=2.0)
    elif fault == "device":
        _device(file)
    elif fault == "held-model":
        _held_model(file)
    elif fault == "no-listing":
        _no_listing(file)
    elif fault.startswith("slow-"):
        _slow(fault.removeprefix("slow-"), file)
    elif fault.startswith("stalled-"):
        _slow(fault.removeprefix("stalled-"), file, ("writev",))
    else:
        name, _, directory = fault.partition("-")
        _failed_sync(getattr(errno, name), directory, file)
    from psservice.cli.main import main as serve

    return serve(sys.argv[3:])


if __name__ == "__main__":
    sys.exit(main())
