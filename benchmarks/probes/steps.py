"""What ``step()`` costs a worker that is alone with a server on loopback: wall time, CPU time, and phases."""

import time

import common  # beside this file
import psutil
import torch

import psclient
from benchmarks.workload.layouts import resnet18, resnet50, resnet_small
from benchmarks.workload.synthetic import Noise, SyntheticModel
from psclient.settings import ClientSettings
from pscore.model.layout import ModelLayout, TensorSpec


def _many() -> ModelLayout:
    return ModelLayout(tuple(TensorSpec(f"layer{i}", (512,), torch.float32) for i in range(5000)))


LAYOUTS = {"resnet50": resnet50, "resnet18": resnet18, "small": resnet_small, "many": _many}


def measure(
    layout: str,
    steps: int,
    warmup: int,
    density: float = 0.01,
    value_type: str = "fp32",
    one_thread: bool = False,
    device: str = "cpu",
) -> dict[str, float]:
    """Take steps with DGS; the medians of all after a warm-up, in which the thresholds settle.

    Args:
        layout: a key of :data:`LAYOUTS`.
        steps: that count.
        warmup: steps before.
        density: of pushes and replies.
        value_type: of pushes and replies.
        one_thread: of torch in this process; else as many as torch takes.
        device: of the model; the server keeps its own on the host.
    """
    if one_thread:
        torch.set_num_threads(1)
    shape = LAYOUTS[layout]()
    model, noise, copy = SyntheticModel(shape).to(device), Noise(shape, 0), common.Copy(shape.size)
    found: dict[str, list[float]] = {}
    settings = ClientSettings(worker="probe", value_type=value_type)
    with (
        psclient.LocalServer(device="cpu", buffers="none", down_density=density, down_value_type=value_type) as server,
        psclient.DGS(
            model.parameters(), lr=0.01, density=density, model=model, server=server, settings=settings
        ) as optimizer,
    ):
        for number in range(warmup + steps):
            noise.fill(model)
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize()
            figures = _step(optimizer, psutil.Process(server.processes[0].pid), copy)
            if number >= warmup:
                for name, value in figures.items():
                    found.setdefault(name, []).append(value)
    return {name: common.median(values) for name, values in found.items()}


def _step(optimizer: torch.optim.Optimizer, server: psutil.Process, copy: common.Copy) -> dict[str, float]:
    copied, copied_cpu = copy.seconds(), copy.seconds(time.thread_time)
    threads, before, started = common.thread_seconds(), _cpu(server), time.perf_counter()
    process = time.process_time()
    optimizer.step(samples=1)  # type: ignore[call-arg]
    process, wall = time.process_time() - process, time.perf_counter() - started
    busiest = max(seconds - threads.get(thread, 0.0) for thread, seconds in common.thread_seconds().items())
    phases = optimizer.report.seconds  # type: ignore[attr-defined]
    return {
        "wall_ms": 1e3 * wall,
        "thread_cpu_ms": 1e3 * busiest,
        "wall_copies": wall / copied,
        "cpu_ms": 1e3 * (process + _cpu(server) - before),
        "cpu_copies": (process + _cpu(server) - before) / copied_cpu,
        "select_encode_copies": (phases["select"] + phases["encode"]) / copied,
        "copy_ms": 1e3 * copied,
        **{f"of {phase}_ms": 1e3 * seconds for phase, seconds in phases.items()},
    }


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    common.run(measure)
