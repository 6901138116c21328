"""The short form of ``make chaos``: servers killed under load, and every push accounted for."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_nothing_is_lost_or_doubled_under_chaos(tmp_path):
    arguments = ["--kills", "3", "--workers", "3", "--only", "kills", "disk", "--output", str(tmp_path)]
    run = subprocess.run([sys.executable, "-m", "chaos", *arguments], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "chaos.json").read_text())
    assert found["good"]
    totals = found["totals"]
    assert totals["sent"] == totals["acknowledged"] == totals["applied"] > 0
    assert (totals["lost"], totals["duplicated"], totals["different"]) == (0, 0, 0)
    assert totals["compared"] > 5
    assert found["faults"]["servers killed"] >= 3
    assert found["faults"]["disk filled"] == 3
