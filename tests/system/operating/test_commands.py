"""The commands of the README in their shortest form: they run, and write what they promise."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verify import soak

pytestmark = pytest.mark.timeout(400)  # a loaded machine starts a server and trainers in minutes

ROOT = Path(__file__).parents[3]


def run(*command: str, cwd: Path = ROOT) -> str:
    answer = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=380)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@pytest.mark.long
def test_a_section_of_the_benchmark(tmp_path):
    run("-m", "benchmarks.bench", "--quick", "--only", "wire", "--output", str(tmp_path))
    report = json.loads((tmp_path / "report.json").read_text())
    assert {"command", "machine", "date"} <= {key.lower() for key in report} | set(report.get("run", {}))
    assert "to dense" in (tmp_path / "report.md").read_text()


@pytest.mark.long
def test_a_comparison_of_two_methods_to_its_last_file(tmp_path):
    few = ["--tasks", "digits", "--methods", "sgd", "outer", "--seeds", "0"]
    run("-m", "benchmarks.compare", "--quick", "--only", "quality", *few, "--output", str(tmp_path))
    assert json.loads((tmp_path / "report.json").read_text())["figures"]["compare"]["failures"] == []
    assert {"compare-workers.png", "report.md"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.long
def test_a_soak_of_seconds_judges_every_curve(tmp_path, capsys):
    little = ["--minutes", "0.1", "--workers", "1", "--hidden", "16", "--output", str(tmp_path)]
    status = soak.main(little)
    found = json.loads((tmp_path / "report.json").read_text())["figures"]["soak"]
    assert found["failures"] == []
    assert len(found["trends"]) == 6
    assert status == (0 if found["flat"] else 1)
    assert "](soak-memory.png)" in (tmp_path / "report.md").read_text()
    assert "written: " in capsys.readouterr().out


def test_calls_of_the_whole_service_with_nearly_right_messages():
    assert run("-m", "tests.hostile.service", "--inputs", "200")
