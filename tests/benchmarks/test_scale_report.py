"""The report of the scale model is whole, from costs to pictures."""

import json
from dataclasses import replace

import pytest

from benchmarks.harness.generators import Window
from benchmarks.scale import __main__ as scale
from benchmarks.scale import check, report, sweeps
from benchmarks.scale.check import Case, Row, replay
from benchmarks.scale.sweeps import Grid, Sweeper, base, saturation, with_workers
from tests.benchmarks.test_scale_model import COSTS

TINY = Grid((1, 8), (1,), (0.001,), (10,), (1, 8), (1,))


@pytest.fixture
def rows():
    case = Case("think", 1_000_000, 0.01, 1, 0.1, "exact", (1, 4))
    found = []
    for workers in case.workers:
        outcome = replay(case, workers, COSTS, 2, 0)
        seen = Window(1.0, outcome.steps_per_second, 0.1, 0.1, 2.0, 3.0, outcome.sent, outcome.received, 0.01, 0.01)
        found.append(Row(case, workers, seen, outcome))
    return found


def test_errors_are_relative_and_those_beyond_the_target_are_marked(rows):
    errors = rows[0].errors()
    assert errors["throughput"] == pytest.approx(0)
    assert errors["bytes"] == pytest.approx(0)
    assert errors["staleness"] == pytest.approx(-1)
    summary, both = report.check(rows).tables
    assert [cell for cell in both.rows[0] if "†" in cell] == ["-100% †"]
    assert summary.rows[0][1] == "2 of 2"


def test_more_shards_move_what_saturates():
    sweeper = Sweeper(COSTS, 0, lambda what: None)
    cluster = base(0.001, 1, 1)
    found = saturation(sweeper, cluster, (1, 64), (1, 10, 30))
    assert found.workers in (10, 30)
    assert found.shards == 64
    assert sweeper.at(with_workers(cluster, 30)).busiest[0] == found.resource


@pytest.mark.long
@pytest.mark.timeout(400)  # a loaded machine starts a server and clients in minutes
def test_the_program_writes_all_its_files(tmp_path, monkeypatch, capsys):
    """With costs that are given, a grid of few points and one short real run."""
    monkeypatch.setattr(sweeps, "QUICK", replace(TINY, bandwidths=(1e9,)))
    monkeypatch.setattr(check, "QUICK", (Case("think", 100_000, 0.005, 1, 0.01, "exact", (1,)),))
    costs, output = tmp_path / "costs.json", tmp_path / "output"
    costs.write_text(json.dumps({"costs": COSTS.plain(), "points": {"decode": [(1, 1.0)]}}))
    assert scale.main(["--quick", "--costs", str(costs), "--output", str(output)]) == 0
    pictures = {f"scale-{name}.png" for name in ("speedup-0001", "bandwidth-1000")}
    pictures |= {f"scale-check-{name}.png" for name in ("throughput", "staleness")}
    assert {path.name for path in output.iterdir()} == pictures | {"costs.json", "report.md", "report.json"}
    assert "What saturates first" in (output / "report.md").read_text()
    assert json.loads((output / "report.json").read_text())["figures"]["sweeps"]["points"]
    assert "written: " in capsys.readouterr().out
