"""The commands of the README in their shortest form: they run, and write what they promise."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run(*command: str, cwd: Path = ROOT) -> str:
    answer = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=110)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def test_a_section_of_the_benchmark(tmp_path):
    run("-m", "benchmarks.bench", "--quick", "--only", "wire", "--output", str(tmp_path))
    report = json.loads((tmp_path / "bench.json").read_text())
    assert {"command", "machine", "date"} <= {key.lower() for key in report} | set(report.get("run", {}))
    assert "to dense" in (tmp_path / "report.md").read_text()
