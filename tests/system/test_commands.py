"""The commands of the README in their shortest form: they run, and write what they promise."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def run(*command: str, cwd: Path = ROOT) -> str:
    answer = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=110)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def test_the_quickstart_from_another_directory(tmp_path):
    printed = run(str(ROOT / "examples" / "quickstart.py"), "--quick", "--out", str(tmp_path), cwd=tmp_path)
    assert "test accuracy" in printed
    summary = json.loads((tmp_path / "summary.json").read_text())
    for method in ("dgs", "asgd"):
        figures = summary[method]
        assert {"test_accuracy", "steps", "push_bytes", "pull_bytes", "seconds", "version"} <= figures.keys()
        assert figures["version"] == figures["steps"] > 0
    assert summary["dgs"]["samples"] == summary["asgd"]["samples"]
    assert summary["dgs"]["push_bytes"] < summary["asgd"]["push_bytes"]
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_a_section_of_the_benchmark(tmp_path):
    run("-m", "benchmarks.bench", "--quick", "--only", "wire", "--output", str(tmp_path))
    report = json.loads((tmp_path / "bench.json").read_text())
    assert {"command", "machine", "date"} <= {key.lower() for key in report} | set(report.get("run", {}))
    assert "to dense" in (tmp_path / "report.md").read_text()


def test_the_example_of_an_optimizer_on_the_server():
    printed = run(str(ROOT / "examples" / "server_rmsprop.py"), "--epochs", "1", "--workers", "2")
    assert "worker 1: epoch 1 of 1" in printed
    assert "test accuracy of the server's model" in printed
