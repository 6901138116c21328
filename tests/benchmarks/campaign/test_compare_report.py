"""Tables, figures, JSON and the page, from results that were made up."""

import importlib
import json

import pytest

from benchmarks.campaign.methods import METHODS
from benchmarks.campaign.report import markdown
from benchmarks.compare import __main__ as program
from benchmarks.compare import figures, report, straggler
from benchmarks.compare.results import entries, pairings
from benchmarks.compare.straggler import Effect
from benchmarks.report import guide
from tests.benchmarks.campaign.campaign_makers import SMALL, comparison, keep, run

EFFECTS = [Effect("dgs", 50.0, 49.0), Effect("asgd_bounded", 50.0, 6.0)]
FACTS = {
    "command": "python -m benchmarks.compare",
    "date": "2026-01-01",
    "machine": {"cpu": "a CPU", "cores": 2, "memory_bytes": 2**30, "system": "Linux", "load_average": (0, 0, 0)},
    "versions": dict.fromkeys(("sparseps", "commit", "python", "torch", "numpy", "grpcio", "protobuf"), "1"),
    "threads": {"torch": 1},
}


@pytest.fixture
def work(tmp_path):
    """A comparison in which DGS is better than ASGD on one task, worse on the other, where DGC diverges once."""
    made = comparison(tmp_path / "runs.jsonl", do=None)
    for seed in (0, 1, 2):
        keep(
            made,
            run("dgs", seed=seed, score=0.95 + seed / 1000),
            run("asgd", seed=seed, score=0.90 + seed / 500),
            run("sgd", workers=1, seed=seed, score=0.97),
            run("dgs", seed=seed, task="language", score=2.2, loss=2.2),
            run("asgd", seed=seed, task="language", score=2.0 + seed / 100, loss=2.0),
            run("dgc", seed=seed, task="language", score=2.1 if seed else None, loss=2.1 if seed else None),
        )
    return made


def test_the_tables_say_who_is_better(work):
    text = markdown(FACTS, report.all_tables(work, EFFECTS), report.notes(SMALL, work))
    assert "| DGS | 4 | 95.10 ± 0.10 | 0.3 | 0.6 | 0.0 | 0.0 | 40 | 1.5 | 4 | 1.0 |" in text
    assert "| ASGD | +4.90 ± 0.06, better |" in text
    assert "| ASGD | −0.190 ± 0.006, worse |" in text
    assert "| DGC | diverged, better |" in text
    assert "(1 diverged)" in text
    assert "DGS is worse than ASGD (Python source, byte by byte), by more than one" in text
    assert "| DGS | 50.0 | 49.0 | 98% | yes |" in text
    assert "| ASGD, --ssp-bound 4 | 50.0 | 6.0 | 12% | no |" in text


def test_a_single_node_is_no_rival(work):
    assert {pairing.rival for pairing in pairings(work.counted)} == {"asgd", "dgc"}


def test_all_runs_are_in_the_json(work):
    found = json.loads(json.dumps(report.figures(SMALL, work, EFFECTS)))
    assert len(found["runs"]) == 18
    assert found["slow_worker"][1]["share"] == pytest.approx(0.12)
    assert {pair["difference"]["verdict"] for pair in found["pairs"]} == {"better", "worse"}


def test_figures_are_small(work, tmp_path):
    paths = figures.draw(tmp_path, entries(work.counted), EFFECTS)
    assert len(paths) == 3
    assert all(5_000 < path.stat().st_size < 200_000 for path in paths)


def test_a_page_takes_the_new_tables_in(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- measured: begin -->\nold\n<!-- measured: end -->\nafter\n")
    guide.into_page(page, "new", [])
    guide.into_page(page, "newer", [tmp_path / "compare-bytes.png"])
    shown = "![compare bytes](compare-bytes.png)\n\nnewer"
    assert page.read_text() == f"before\n<!-- measured: begin -->\n\n{shown}\n<!-- measured: end -->\nafter\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="needs one"):
        guide.into_page(page, "new", [])


def test_every_method_has_a_place_in_the_figures(tmp_path):
    made = comparison(tmp_path / "runs.jsonl", do=None)
    keep(made, *(run(method, workers=1 if kind.kind == "single" else 4) for method, kind in METHODS.items()))
    assert len(figures.draw(tmp_path, entries(made.counted), [])) == 2


@pytest.mark.parametrize("program", ["compare", "evidence", "ldte", "rivals", "scale"])
def test_a_page_without_room_for_tables_is_refused_before_all_runs(program, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("no marks")
    main = importlib.import_module(f"benchmarks.{program}.__main__").main
    for path, reason in ((page, "needs one"), (tmp_path / "none.md", "there is no file")):
        with pytest.raises(SystemExit):
            main(["--output", str(tmp_path / "output"), "--page", str(path)])
        assert reason in capsys.readouterr().err
    assert not (tmp_path / "output").exists()


@pytest.mark.timeout(400)
def test_the_program_writes_its_files_and_does_nothing_twice(tmp_path, monkeypatch, capsys):
    done, page = [], tmp_path / "page.md"
    page.write_text("<!-- measured: begin -->\n<!-- measured: end -->\n")
    monkeypatch.setattr(program, "execute", lambda spec: done.append(spec) or run(spec.method).outcome)
    monkeypatch.setattr(straggler, "_time", lambda method, timing: 50.0 / timing.slowness)
    command = ["--smoke", "--output", str(tmp_path / "output"), "--page", str(page)]
    assert program.main(command) == 0
    names = {"compare.md", "compare.json", "compare-workers.png", "compare-bytes.png", "compare-slow-worker.png"}
    assert {path.name for path in (tmp_path / "output").iterdir()} == names | {"journal.jsonl"}
    assert "| DGS | 2 |" in page.read_text()
    assert "| DGS | 50.0 | 5.0 | 10% | no |" in capsys.readouterr().out
    count = len(done)
    assert program.main([*command, "--report"]) == 0
    assert len(done) == count > 0
