"""The calls and bytes of a step on a device, counted without one: ``python -m benchmarks.gpu.fake_device``.

The worker's own code runs, on tensors of the host that take no memory until they are touched. In the place of kernels
stands a device that computes nothing and takes the wanted number of entries. Nothing here says how fast a device is.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.harness import machine
from benchmarks.workload.layouts import GROUP_ELEMENTS, gpt2, llama_1b, resnet50
from psclient.compress.gradients import Gradients
from psclient.compress.groups import ParamGroups
from psclient.compress.host_table import Choice
from psclient.compress.method import State
from psclient.compress.selector import Grouping, Selector
from psclient.model.module import describe
from psclient.optim.dgs import METHOD
from psclient.report import StepReport
from pscore.model.layout import ModelLayout
from pscore.selection import DEFAULT_DENSE_BELOW
from pscore.selection.cuda import launches
from pscore.selection.cuda.launches import DeviceKernels, Pending, Pieces

MODELS = {"ResNet-50": resnet50, "GPT-2 124 M": gpt2, "Llama 1 B": llama_1b}
DENSITY = 0.01
ENTRY_BYTES = 6  # of an entry that is wanted: what a device must bring down at the least in this form


@dataclass
class Counted:
    """Calls and bytes of a step, and the host's own time on its processors, without the device's."""

    launches: int = 0
    copies_up: int = 0
    bytes_up: int = 0
    copies_down: int = 0
    bytes_down: int = 0
    waits: int = 0
    device_bytes: int = 0
    host_seconds: float = 0.0


class _Kernel:
    """A kernel, or one of a grid, that does nothing."""

    def __init__(self, counted: Counted) -> None:
        self._counted = counted

    def __getattr__(self, name: str) -> "_Kernel":
        return self

    def __getitem__(self, grid: object) -> "_Kernel":
        return self

    def __call__(self, *arguments: object, **options: object) -> None:
        self._counted.launches += 1


class _FakeDevice(DeviceKernels):
    """Takes the wanted entries, the first ones of each piece, and counts its calls."""

    def __init__(self, counted: Counted) -> None:
        super().__init__(torch.device("cpu"))
        self._kernels, self._counted = _Kernel(counted), counted

    def launch(self, rows: NDArray[Any], pieces: Pieces, *arguments: Any, **options: Any) -> Pending:
        pending = super().launch(rows, pieces, *arguments, **options)
        started = time.process_time()
        taken, thresholds, excess, counts, lines = launches._sections(pending._host, len(rows), pieces)[2:]
        sizes = np.bincount(pieces.rows, minlength=len(rows))
        each, first = rows["wanted"] // sizes, rows["wanted"] % sizes
        place = np.arange(pieces.rows.size) - pieces.of_rows[pieces.rows]
        taken[:], thresholds[:], excess[:] = torch.from_numpy(rows["wanted"]), 1.0, 1.0
        counts.numpy()[:] = each[pieces.rows] + (place < first[pieces.rows])
        found = counts.numpy()
        table = lines.view(-1, launches.LINE_BYTES).numpy()
        table.view(np.float32)[:, : launches.LINE] = 1.0
        inner = table.view(np.int16)[:, 2 * launches.LINE :]
        at = np.arange(found.sum())
        inner[at // launches.LINE, at % launches.LINE] = at - np.repeat(np.cumsum(found) - found, found)
        mask, tables = pieces.rows.size * self._block // 8, 12 * pieces.rows.size + rows.nbytes
        self._counted.device_bytes += pending._host.numel() + pending._rest.numel() + mask + tables
        self._counted.host_seconds -= time.process_time() - started  # the device's work
        return pending


@contextmanager
def _counting(counted: Counted) -> Iterator[None]:
    to_device, copy, wait = launches.to_device, launches.SideStream.copy_to_host, Pending.wait

    def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
        counted.copies_up += 1
        counted.bytes_up += sum(array.nbytes for array in arrays)
        return to_device(arrays, device)

    def download(own: Any, tensor: torch.Tensor) -> Any:
        counted.copies_down += 1
        counted.bytes_down += tensor.numel() * tensor.element_size()
        started = time.process_time()
        copied = copy(own, tensor)
        counted.host_seconds -= time.process_time() - started  # a device copies beside the host
        return copied

    def waited(own: Pending) -> None:
        counted.waits += 1
        wait(own)

    with (
        patch.object(launches, "to_device", upload),
        patch.object(launches.SideStream, "copy_to_host", download),
        patch.object(Pending, "wait", waited),
    ):
        yield


def count(layout: ModelLayout) -> tuple[Counted, int, int]:
    """Count a warm step of DGS; return it, the entries that it sends, and the groups of its push."""
    parameters = [
        nn.Parameter(torch.empty(spec.shape, dtype=torch.float32, device="cpu")) for spec in layout.parameters
    ]
    groups = [{"params": parameters, "lr": 0.1, "momentum": 0.7, "weight_decay": 0.0, "density": DENSITY}]
    with patch("psclient.model.module.require_values", lambda *_: None):  # which reads all of it
        model = describe(None, groups)
    of_groups, states = ParamGroups(groups), defaultdict[torch.Tensor, State](dict)
    of_groups.read()
    counted = Counted()
    device = _FakeDevice(counted)
    choice = Choice(None, layout.whole_below(DEFAULT_DENSE_BELOW), lambda _: device)
    grouping = Grouping(model.layout, 4 * GROUP_ELEMENTS)
    selector = Selector(METHOD, model, _states(parameters, states), of_groups, choice, grouping)
    gradients = Gradients({n: torch.empty_like(p) for n, p in enumerate(parameters)})
    entries = 0
    for _ in range(2):  # the first fills tables that stay
        vars(counted).update(vars(Counted()))
        with _counting(counted):
            started = time.process_time()
            sent = [selector.compress(group, gradients, 1.0, StepReport(0)) for group in grouping.groups]
            counted.host_seconds += time.process_time() - started
        entries = sum(sum(each.entries.values()) for each in sent)
    return counted, entries, len(grouping.groups)


def _states(
    parameters: Sequence[torch.Tensor], states: MutableMapping[torch.Tensor, State]
) -> MutableMapping[torch.Tensor, State]:
    """Have residuals and thresholds, so that nothing is searched for."""
    for parameter in parameters:
        residual = torch.empty(parameter.numel(), dtype=torch.float32, device="cpu")
        states[parameter] = {"residual": residual, "recall": {"threshold": 1.0, "drift": 0.0}}
    return states


def table(models: Sequence[str]) -> list[str]:
    """Return the lines of a table in Markdown."""
    heads = ("model", "tensors", "groups", "launches", "waits", "copies up", "kB up", "copies down", "MB down")
    heads += ("least MB down", "MB of device memory", "host, ms a million entries")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in models:
        layout = MODELS[name]()
        found, entries, groups = count(layout)
        cells = (
            *(name, len(layout.parameters), groups, found.launches, found.waits, found.copies_up),
            *(f"{found.bytes_up / 1e3:,.0f}", found.copies_down, f"{found.bytes_down / 1e6:,.2f}"),
            *(f"{ENTRY_BYTES * entries / 1e6:,.2f}", f"{found.device_bytes / 1e6:,.0f}"),
            f"{found.host_seconds * 1e9 / entries:.1f}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and write it to ``--output``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.fake_device", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu/counts.md"), metavar="FILE")
    options = parser.parse_args(arguments)
    lines = table(options.models)
    facts = machine.describe("benchmarks.gpu.fake_device", list(sys.argv[1:] if arguments is None else arguments))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("\n".join([str(facts), "", *lines, ""]))
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
