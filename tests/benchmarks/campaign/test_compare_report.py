"""Tables and figures of a comparison, from results that were made up."""

import json

import pytest

from benchmarks.campaign import report
from benchmarks.campaign.comparison import Entrant
from benchmarks.campaign.methods import METHODS
from benchmarks.compare import __main__ as program
from benchmarks.compare import straggler
from benchmarks.compare.stages import FORM
from benchmarks.compare.straggler import Effect
from benchmarks.harness.machine import describe
from benchmarks.harness.report import markdown
from tests.benchmarks.campaign.campaign_makers import comparison, keep, run

EFFECTS = [Effect("dgs", 50.0, 49.0), Effect("asgd_bounded", 50.0, 6.0)]
RIVALS = {"DGS": lambda _: Entrant("dgs", FORM)}


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
    sections = [report.section("compare", "Quality", work, RIVALS), straggler.section(EFFECTS)]
    text = markdown("Compare", describe("benchmarks.compare", []), sections)
    assert "| DGS | 4 | 95.10 ± 0.10 | 0.3 | 0.6 | 0.0 | 0.0 | 40 | 1.5 | 4 | 1.0 |" in text
    assert "– | 90.20 (−4.90 ± 0.06, worse) |" in text
    assert "2.010 (+0.190 ± 0.006, better)" in text
    assert "(diverged, worse)" in text
    assert "(1 diverged)" in text
    assert "| DGS | 50.0 | 49.0 | 98% |" in text
    assert "| ASGD, --ssp-bound 4 | 50.0 | 6.0 | 12% |" in text


def test_all_runs_are_in_the_json(work):
    found = json.loads(json.dumps(report.section("compare", "Quality", work, RIVALS).figures))
    assert len(found["runs"]) == 18
    assert straggler.section(EFFECTS).figures["asgd_bounded"]["share"] == pytest.approx(0.12)


def test_every_method_has_a_place_in_figures_that_are_small(tmp_path):
    made = comparison(tmp_path / "runs.jsonl", do=None)
    keep(made, *(run(method, workers=1 if kind.kind == "single" else 4) for method, kind in METHODS.items()))
    for section in (report.section("compare", "Quality", made, RIVALS), straggler.section(EFFECTS)):
        [path] = [plot.save(tmp_path) for plot in section.plots]
        assert 5_000 < path.stat().st_size < 200_000


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_program_writes_its_files_and_does_nothing_twice(tmp_path, monkeypatch, capsys):
    done = []
    monkeypatch.setattr(program, "execute", lambda spec: done.append(spec) or run(spec.method).outcome)
    monkeypatch.setattr(straggler, "_timed", lambda method, slowness, *_: {"steps_per_second": 50.0 / slowness})
    command = ["--smoke", "--output", str(tmp_path / "output")]
    assert program.main(command) == 0
    names = {"report.md", "report.json", "compare-workers.png", "compare-slow-worker.png"}
    assert {path.name for path in (tmp_path / "output").iterdir()} == names | {"journal.jsonl"}
    text = (tmp_path / "output" / "report.md").read_text()
    assert "| DGS | 2 |" in text
    assert "| DGS | 50.0 | 5.0 | 10% |" in text
    assert "One slow worker" in capsys.readouterr().out
    count = len(done)
    assert program.main([*command, "--report"]) == 0
    assert len(done) == count > 0
