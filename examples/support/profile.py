"""What bounds the images per second: each part of a training step measured by itself, on this machine."""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import psclient

from . import launch, methods
from .images import Images
from .loaders import Endless, choose, make_loader

REPETITIONS = 5


@dataclass(frozen=True)
class Rate:
    """Images per second: the median of several repetitions, the least and the most of them."""

    median: float
    least: float
    most: float


def run(
    options: argparse.Namespace, images: Images, model: nn.Module, device: torch.device, seconds: float = 1.0
) -> int:
    """Measure, and show and write what was found: a table, OUT/profile.json and OUT/profile.png.

    Args:
        options: of the script.
        images: the training images.
        model: on its device.
        device: that trains.
        seconds: that one repetition takes at least.
    """
    console = Console()
    chosen, counts = choose(options.loader), sorted({*_doubled(os.cpu_count() or 1), options.loaders})
    loaders = {}
    for name in ("dali", "torchvision") if chosen == "dali" else ("torchvision",):
        for count in [options.loaders] if name == "dali" else counts:
            with console.status(f"{name}, {count}"):
                loaders[_loader_name(name, count)] = _loading(options, images, device, name, count, seconds)
    with console.status("forward and backward"):
        computing = _computing(options, model, device, len(images.classes), seconds)
    with console.status("step()"):
        step_seconds, phases = _stepping(options, model, device, len(images.classes), len(images))
    found = {
        "machine": {"cpus": os.cpu_count(), "threads": torch.get_num_threads(), "device": _device_name(device)},
        "model": options.model,
        "image_size": options.image_size,
        "batch_size": options.batch_size,
        "precision": options.precision,
        "method": options.method,
        "loader": _loader_name(chosen, options.loaders),
        "loaders": {name: asdict(rate) for name, rate in loaders.items()},
        "forward_backward": asdict(computing),
        "step_seconds": step_seconds,
        "step_phases": phases,
    }
    found |= judge(found)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "profile.json").write_text(json.dumps(found, indent=2) + "\n")
    _draw(found, options.out / "profile.png")
    _print(found, console)
    console.print(f"wrote {options.out / 'profile.json'} and profile.png", highlight=False, soft_wrap=True)
    return 0


def judge(found: dict[str, Any]) -> dict[str, Any]:
    """Say which part bounds the run: the loader works beside the training, forward, backward and step() in turn."""
    loading = found["loaders"][found["loader"]]["median"]
    compute_seconds = found["batch_size"] / found["forward_backward"]["median"]
    training = found["batch_size"] / (compute_seconds + found["step_seconds"])
    if loading < training:
        bound = "the loader"
    else:
        bound = "forward and backward" if compute_seconds > found["step_seconds"] else "the optimizer's step()"
    return {"training": training, "bound": bound, "at_most": min(loading, training)}


def rate(batch: Callable[[], int], warm_up: int, seconds: float) -> Rate:
    """Time something that does a batch and returns its images; the first ``warm_up`` do not count."""
    for _ in range(warm_up):
        batch()
    rates = []
    for _ in range(REPETITIONS):
        images, started, now = 0, time.perf_counter(), 0.0
        while now < seconds:
            images += batch()
            now = time.perf_counter() - started
        rates.append(images / now)
    return Rate(statistics.median(rates), min(rates), max(rates))


def _loading(
    options: argparse.Namespace, images: Images, device: torch.device, name: str, count: int, seconds: float
) -> Rate:
    loader = make_loader(
        name,
        images,
        Endless(len(images)),
        training=True,
        batch_size=options.batch_size,
        size=options.image_size,
        workers=count,
        device=device,
    )
    batches = iter(loader)

    def batch() -> int:
        labels = next(batches)[1]
        _synchronise(device)
        return len(labels)

    return rate(batch, 2 * count + 4, seconds)  # more than is prefetched


def _computing(
    options: argparse.Namespace, model: nn.Module, device: torch.device, classes: int, seconds: float
) -> Rate:
    backward = _backward(options, model, device, classes)

    def batch() -> int:
        backward()
        _synchronise(device)
        return int(options.batch_size)

    return rate(batch, 2, seconds)


def _stepping(
    options: argparse.Namespace, model: nn.Module, device: torch.device, classes: int, size: int
) -> tuple[float, dict[str, float]]:
    """Return the median seconds of ``step()``, and of its phases, with a server on this machine."""
    length = methods.Length(options.epochs, max(1, size // options.batch_size), options.warmup_epochs)
    totals: list[float] = []
    phases: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        psclient.LocalServer(data_dir=folder, device=options.device) as server,
    ):
        place = launch.Place(server.server, "profile", 0, 1, device, options.out, resume=False)
        optimizer, _ = methods.make_optimizer(options, model, place, length)
        backward = _backward(options, model, device, classes)
        for number in range(2 + 2 * REPETITIONS):
            optimizer.zero_grad()
            backward()
            _synchronise(device)
            started = time.perf_counter()
            optimizer.step()
            _synchronise(device)
            if number < 2:  # the first builds what the others use
                continue
            totals.append(time.perf_counter() - started)
            report = getattr(optimizer, "report", None)
            for phase, spent in report.seconds.items() if report else ():
                phases.setdefault(phase, []).append(spent)
        if hasattr(optimizer, "close"):
            optimizer.close()
    return statistics.median(totals), {phase: statistics.median(spent) for phase, spent in phases.items()}


def _backward(options: argparse.Namespace, model: nn.Module, device: torch.device, classes: int) -> Callable[[], None]:
    """Return what does a forward and a backward pass over a batch of noise."""
    inputs = torch.randn(options.batch_size, 3, options.image_size, options.image_size, device=device)
    labels = torch.randint(classes, (options.batch_size,), device=device)
    dtype = torch.float16 if options.precision == "fp16" else torch.bfloat16
    model.train()

    def passes() -> None:
        with torch.autocast(device.type, dtype, enabled=options.precision != "fp32"):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()

    return passes


def _print(found: dict[str, Any], console: Console) -> None:
    title = f"{found['model']}, {found['image_size']} pixels, batches of {found['batch_size']}, {found['precision']}"
    table = Table(title=f"{title}, {found['machine']['device']}, {found['machine']['cpus']} CPUs")
    table.add_column("part")
    for heading in ("images/s", "least to most", "ms a batch"):
        table.add_column(heading, justify="right")
    for name, images in [*found["loaders"].items(), ("forward and backward", found["forward_backward"])]:
        between = f"{images['least']:.1f} to {images['most']:.1f}"
        table.add_row(name, f"{images['median']:.1f}", between, f"{_milliseconds(found, images):.1f}")
    spent = found["step_seconds"]
    table.add_row(f"step(), {found['method']}", f"{found['batch_size'] / spent:.1f}", "", f"{1e3 * spent:.1f}")
    for phase, seconds in found["step_phases"].items():
        table.add_row(f"  {phase}", "", "", f"{1e3 * seconds:.1f}")
    console.print(table)
    console.print(
        f"A run is bounded by {found['bound']}: at most {found['at_most']:.1f} images/s for a worker. The loader "
        f"({found['loader']}) gives {found['loaders'][found['loader']]['median']:.1f}, training takes "
        f"{found['training']:.1f}.",
        highlight=False,
        soft_wrap=True,
    )
    if found["machine"]["device"] == "cpu":
        console.print("Here both share the CPUs, so a run has less than that.", highlight=False)


def _draw(found: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    rates = found["loaders"] | {"forward and backward": found["forward_backward"]}
    names, middles = list(rates), [rate["median"] for rate in rates.values()]
    errors = [[rate["median"] - rate["least"] for rate in rates.values()]]
    errors.append([rate["most"] - rate["median"] for rate in rates.values()])
    names += ["step()", "forward, backward, step()"]
    middles += [found["batch_size"] / found["step_seconds"], found["training"]]
    errors = [[*side, 0.0, 0.0] for side in errors]
    colours = ["tab:blue"] * len(found["loaders"]) + ["tab:orange", "tab:green", "tab:gray"]
    bars = left.barh(names, middles, xerr=errors, color=colours)
    left.bar_label(bars, fmt="%.4g", padding=4)
    left.invert_yaxis()
    left.margins(x=0.25)
    left.set_xlabel("images per second (median; least to most)")
    figure.suptitle(f"{found['model']}, {found['method']}: bounded by {found['bound']}")
    begun = 0.0
    parts = {"forward, backward": _milliseconds(found, found["forward_backward"])}
    parts |= {phase: 1e3 * seconds for phase, seconds in found["step_phases"].items()}
    parts["rest of step()"] = max(0.0, 1e3 * (found["step_seconds"] - sum(found["step_phases"].values())))
    for name, milliseconds in parts.items():
        right.bar(["one step"], [milliseconds], bottom=[begun], label=f"{name}: {milliseconds:.1f}")
        begun += milliseconds
    right.set_ylabel("milliseconds")
    right.set_xlim(-0.6, 0.6)
    right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
    figure.savefig(path, dpi=120)


def _milliseconds(found: dict[str, Any], rate: dict[str, float]) -> float:
    return float(1e3 * found["batch_size"] / rate["median"])


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _loader_name(name: str, count: int) -> str:
    kind = "thread" if name == "dali" else "process"
    plural = "" if count == 1 else "s" if name == "dali" else "es"
    return f"{'DALI' if name == 'dali' else name}, {count} {kind}{plural}"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _doubled(most: int) -> Iterator[int]:
    """Yield 1, 2, 4 and so on, up to a number."""
    count = 1
    while count <= most:
        yield count
        count *= 2
