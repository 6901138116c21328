"""``make gpu``: its plan names what exists, its figures run on the host, and without a GPU it says so."""

import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import figures
from benchmarks.gpu.plan import STEPS, Step
from benchmarks.harness.section import Section
from benchmarks.sections import cuda_selection

ROOT = Path(__file__).parents[2]


def test_the_plan_takes_under_20_minutes_and_names_files_that_exist(capsys):
    assert gpu.main(["--plan"]) == 0
    said = capsys.readouterr().out
    assert sum(step.minutes for step in STEPS) < 20
    for step in STEPS:
        assert f"{step.name}, {step.minutes:g} minutes" in said
        for word in step.command[1:]:
            if word.endswith(".py"):
                assert (ROOT / word).is_file(), word


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_does_nothing_and_says_so(capsys):
    assert gpu.main([]) == gpu.NO_GPU
    assert "no GPU that torch and Triton can use" in capsys.readouterr().err


def test_a_step_that_fails_or_lasts_is_in_the_report_and_the_next_one_runs(tmp_path, monkeypatch, capsys):
    steps = (
        Step("bad", "it fails", 1, (sys.executable, "-c", "print('seen'); raise SystemExit(3)")),
        Step("slow", "it lasts", 0.01, (sys.executable, "-c", "import time; time.sleep(60)")),
        Step("good", "it passes", 1, (sys.executable, "-c", "print('fine')")),
    )
    monkeypatch.setattr(gpu, "STEPS", steps)
    monkeypatch.setattr(gpu, "OUT", tmp_path)
    monkeypatch.setattr(gpu, "_VERSIONS", "print('versions')")
    assert gpu.main([]) == 1
    report = (tmp_path / "report.md").read_text()
    heads = [line for line in report.splitlines() if line.startswith("## ")]
    for head, how in zip(heads, ("bad: FAILED with status 3", "slow: ENDED after", "good: passed"), strict=True):
        assert head.startswith(f"## {how}")
    assert "seen" in report
    assert "fine" in report


@pytest.mark.long
def test_the_figures_run_where_there_is_no_gpu(capsys):
    figures.main(["--device", "cpu", "--elements", "200000", "--layout", "small"])
    said = capsys.readouterr().out
    for what in ("step(), small, cpu: wall", "of select", "push of 1 % applied", "top-k reply with its bytes"):
        assert what in said, said


class Event:
    """A CUDA event for a device that has none: the host's clock."""

    clock = 0.0

    def __init__(self, **_):
        self.at = 0.0

    def record(self):
        Event.clock += 1.0
        self.at = Event.clock

    def elapsed_time(self, other):
        return other.at - self.at


@pytest.mark.long
def test_the_table_of_selection_on_a_gpu_is_made(monkeypatch):
    """In Triton's interpreter, with a fake clock; where a GPU is, on that."""
    pytest.importorskip("triton")
    from pscore.selection.cuda.launches import DeviceKernels

    if not torch.cuda.is_available():
        host = torch.device("cpu")
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
        monkeypatch.setattr(cuda_selection, "DEVICE", host)
        monkeypatch.setattr(cuda_selection, "device_kernels", lambda _: DeviceKernels(host))
    section = Section("selection", "title")
    cuda_selection.measure(section, 20_000, 2)
    assert [row[0] for row in section.tables[0].rows] == ["copy", "ours", "torch.topk"]
    assert all(0.5 < share < 1.5 for share in section.figures["cuda"]["entries"])
