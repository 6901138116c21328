"""The report of the scale model is whole, from costs to pictures."""

import json

import pytest

from benchmarks import report
from benchmarks.harness.machine import describe
from benchmarks.scale import __main__ as scale
from benchmarks.scale import check, sections, sweeps, tables
from benchmarks.scale.check import Case, Row, replay
from benchmarks.scale.client import Step
from benchmarks.scale.real import Seen, summary
from benchmarks.scale.sweeps import Grid, Sweeper, base, networks, saturation, with_workers
from tests.benchmarks.test_scale_model import COSTS

TINY = Grid((1, 8), (1,), (0.001,), (10,), (1000,), (4.0,), (1, 8), (1,), ((4, 2, 0.0),))


@pytest.fixture
def rows():
    case = Case("think", 1_000_000, 0.01, 1, 0.1, "exact", (1, 4))
    found = []
    for workers in case.workers:
        outcome = replay(case, workers, COSTS, 2, 0)
        seen = Seen(outcome.steps_per_second, 2.0, 3.0, outcome.sent, outcome.received, 0.01, 0.01, 0.01, 0.01, 100.0)
        found.append(Row(case, workers, seen, outcome))
    return found


def test_errors_are_relative_and_those_beyond_the_target_are_marked(rows):
    errors = rows[0].errors()
    assert errors["throughput"] == pytest.approx(0)
    assert errors["bytes"] == pytest.approx(0)
    assert errors["staleness"] == pytest.approx(-1)
    [first, _] = tables.validation(rows).rows
    assert [cell for cell in first if "†" in cell] == ["-100% †"]
    assert tables.summary(rows).rows[0][1] == "2 of 2"


def test_the_report_is_written_whole(rows, tmp_path):
    sweeper = Sweeper(COSTS, 0, lambda what: None)
    check, checked = sections.check(rows)
    swept, drawn = sections.sweep(sweeper, TINY)
    found = [sections.costs(COSTS, {"decode": [(1, 1.0)]}), check, swept]
    written = report.write(tmp_path, describe([]), found, "report.json")
    assert [path.name for path in written] == ["report.html", "report.md", "report.json"]
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert html.count("<svg") == len(drawn) + len(checked)
    assert "http" not in html.replace("http-equiv", "")
    points = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["figures"]["sweeps"]["points"]
    assert points
    picture = drawn[0].save(tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_more_shards_move_what_saturates():
    sweeper = Sweeper(COSTS, 0, lambda what: None)
    cluster = base(0.001, 1, **networks(1, 10_000))
    found = saturation(sweeper, cluster, (1, 64), (1, 10, 30))
    assert found.workers in (10, 30)
    assert found.shards == 64
    assert sweeper.at(with_workers(cluster, 30)).busiest[0] == found.resource


def test_steps_outside_of_the_window_are_not_counted():
    steps = [[Step(0.0, 0.1, 0.2, 5, 100, 50), Step(1.0, 1.1, 1.2, 1, 100, 50), Step(1.9, 2.1, 2.2, 9, 100, 50)]]
    seen = summary(steps, (1.0, 10.0, 1.0), (2.0, 10.5, 1.25))
    assert seen.steps == pytest.approx(1 + 1 / 3)
    assert seen.staleness == 1
    assert seen.server_cpu == pytest.approx(0.5 / seen.steps)


@pytest.mark.timeout(400)  # a loaded machine starts a server and clients in minutes
def test_the_program_writes_all_its_files(tmp_path, monkeypatch, capsys):
    """With costs that are given, a grid of few points and one short real run."""
    monkeypatch.setattr(sweeps, "QUICK", TINY)
    monkeypatch.setattr(check, "QUICK", (Case("think", 100_000, 0.005, 1, 0.01, "exact", (1,)),))
    costs, page, output = tmp_path / "costs.json", tmp_path / "page.md", tmp_path / "output"
    costs.write_text(json.dumps({"costs": COSTS.plain(), "points": {"decode": [(1, 1.0)]}}))
    page.write_text("<!-- measured: begin -->\n<!-- measured: end -->\n")
    assert scale.main(["--quick", "--costs", str(costs), "--page", str(page), "--output", str(output)]) == 0
    pictures = {f"scale-{name}.png" for name in ("speedup-0001", "staleness-0001", "out-0001", "server-cards")}
    pictures |= {f"scale-{name}.png" for name in ("worker-cards", "compute", "modes")}
    names = {path.name for path in output.iterdir()}
    assert names >= pictures | {"costs.json", "report.html", "report.md", "report.json"}
    assert {path.name for path in tmp_path.glob("*.png")} == {name for name in names if name.endswith(".png")}
    assert "What saturates first" in page.read_text()
    assert "written: " in capsys.readouterr().out
