"""The steps of ``make gpu``, in order: a machine with a GPU may be lent for minutes, so what says most comes first."""

import sys
from dataclasses import dataclass

_PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs")


@dataclass(frozen=True, slots=True)
class Step:
    """A command, what it shows, and the minutes after which it is ended."""

    name: str
    shows: str
    minutes: float
    command: tuple[str, ...]


STEPS = (
    Step(
        "kernels",
        "the Triton kernels, compiled for this device, have the bits of the host's loops",
        4,
        (
            *_PYTEST,
            "tests/pscore/selection/test_device_segments.py",
            "tests/psclient/compress/test_device_table.py",
            "tests/psclient/model/test_replica_on_device.py",
            "tests/psservice/replies/test_topk_on_device.py",
        ),
    ),
    Step(
        "figures",
        "selection against the device's copy rate and torch.topk, step() by phase, the server on CPU and GPU",
        5,
        (sys.executable, "-m", "benchmarks.gpu.figures"),
    ),
    Step(
        "tests",
        "training with the model, the server and DALI's pipeline on the GPU",
        6,
        (
            *_PYTEST,
            "tests/system/training/test_cuda.py",
            "tests/examples/test_dali.py",
        ),
    ),
    Step(
        "quickstart",
        "server and workers on the GPU reach the quickstart's targets",
        3,
        (sys.executable, "examples/quickstart.py", "--device", "cuda", "--out", "runs/gpu/quickstart"),
    ),
)
