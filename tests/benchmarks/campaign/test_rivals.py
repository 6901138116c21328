"""Time to the same loss: the interpolation, the order of the work, the tables, and every kind of worker on loopback."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest

from benchmarks.campaign.journal import Journal
from benchmarks.harness.machine import describe
from benchmarks.harness.report import markdown
from benchmarks.network import lab
from benchmarks.rivals import __main__ as rivals
from benchmarks.rivals import report
from benchmarks.rivals.campaign import Campaign, time_to
from benchmarks.rivals.cells import Cell, cells, decides, job_of, train
from benchmarks.rivals.contenders import CONTENDERS, DENSE_STEPS
from benchmarks.rivals.synchronous import batches_before
from benchmarks.rivals.worker import Moment, Told
from tests.benchmarks.campaign.campaign_makers import Silent
from tests.tiers import long_but

pytestmark = pytest.mark.timeout(400)  # the first run of a machine compiles all loops before it forks

CELL = Cell(100, 0, "equal", 4)


@pytest.mark.parametrize(
    ("target", "curve", "seconds"),
    [
        (2.0, [(1.0, 3.0), (2.0, 1.0)], 1.5),
        (2.0, [(1.0, 1.5)], 1.0),
        (2.0, [(1.0, 3.0), (2.0, 2.5)], None),
        (2.0, [(1.0, 3.0), (2.0, 2.0), (3.0, 2.5), (4.0, 1.0)], 2.0),
        (2.0, [], None),
        (2.0, [(1.0, math.nan), (2.0, math.nan)], None),
    ],
)
def test_the_time_to_a_target_lies_between_two_points(target, curve, seconds):
    assert time_to(target, curve) == seconds


def trained(done):
    """Every step takes 10 ms, on a network 20 more; the dense first steps twice as long. Rate 0.125 is best."""

    def do(job, network):
        done.append((job, network is not None))
        usual = 0.03 if network else job.pace + 0.01
        moments = [
            Moment(usual * (step + min(step, DENSE_STEPS)), 100 * step, 200 * step) for step in range(job.steps + 1)
        ]
        curve = [(step, moments[step].seconds, 4.0 - 0.02 * step) for step in range(8, job.steps + 1, 8)]
        final = 2.0 + abs(job.rate - 0.125) + (0.1 if job.inner == "SGD" else 0.0)
        return [Told(job.steps, moments[DENSE_STEPS], moments[-1], curve, final)] * job.workers

    return do


@pytest.fixture
def network(monkeypatch):
    monkeypatch.setattr(Cell, "network", lambda self: nullcontext(object()))


@pytest.mark.long
def test_seeds_are_shown_with_their_spread_and_lead_only_if_all_get_there(tmp_path, network):
    def do(job, on_network):
        """Seed 1 of DiLoCo never gets there; DDP takes longer with it, ours not as long."""
        (told, *_) = trained([])(job, on_network)
        lift = {"diloco": (0.0, 9.0), "ddp": (0.0, 0.5)}.get(job.contender, (0.0, 0.0))
        lift = (0.25, -0.25) if CONTENDERS[job.contender].method else lift
        curve = [(steps, seconds, loss + lift[job.seed % 100]) for steps, seconds, loss in told.curve]
        return [replace(told, curve=curve)] * job.workers

    journal = Journal(tmp_path / "journal.jsonl", Silent())
    campaign = Campaign(journal, 4096, lambda cell: (0, 1), do)
    campaign.run([CELL])
    words = markdown("Rivals", describe("x", []), [report.section(campaign, [CELL], [3.0])])
    assert "| 2 (2 to 3) |" in words, "DDP"
    assert " ×, within the seeds' spread" in words
    assert "| – (1 of 2) |" in words, "DiLoCo"
    assert sum(journal.commits.values()) == len((tmp_path / "journal.jsonl").read_text().splitlines())


@pytest.mark.long
def test_runs_that_the_repository_keeps_are_not_done_again(tmp_path, network):
    done, kept = [], tmp_path / "kept.jsonl"
    first = Journal(tmp_path / "first.jsonl", Silent(), kept=kept)
    Campaign(first, 4096, do=trained(done)).run([CELL])
    first.keep()
    first.keep()
    count = len(done)
    second = Journal(tmp_path / "second.jsonl", Silent(), kept=kept)
    Campaign(second, 4096, do=trained(done)).run([CELL])
    assert len(done) == count
    assert not (tmp_path / "second.jsonl").exists()
    assert len(kept.read_text().splitlines()) == count
    assert second.commits == first.commits


@pytest.mark.long
def test_a_rival_is_trained_once_and_timed_in_each_cell(tmp_path, network):
    done = []
    campaign = Campaign(Journal(tmp_path / "journal.jsonl", Silent()), 4096, do=trained(done))
    campaign.run([CELL])
    assert {rate for _, rate in campaign.chosen.values()} == {0.125}
    assert not any(inner == "SGD" for inner, _ in campaign.chosen.values())
    in_cell = {job.contender: job.steps for job, is_in_network in done if is_in_network}
    assert in_cell.keys() == CONTENDERS.keys() - {"most"}, "3 of 4 are all but one"
    assert {in_cell[key] for key in in_cell if CONTENDERS[key].method} == {128}
    assert {in_cell[key] for key in in_cell if not CONTENDERS[key].method} == {26}
    for seeds in campaign.measured.values():
        assert time_to(3.0, seeds[0].curve) == pytest.approx(10 * 0.06 + 40 * 0.03)
    assert campaign.measured[CELL, "power-1"][0].step_seconds == pytest.approx(0.03)
    assert campaign.measured[CELL, "power-1"][0][2:4] == (100, 200)
    assert campaign.measured[CELL, "power-1"][0].gloo_seconds == pytest.approx(0.01)
    section = report.section(campaign, [CELL, CELL._replace(scenario="slow")], [3.0, 1.0])
    assert [plot.key for plot in section.plots] == ["rivals-4-3"], "nobody gets to 1.0"
    words = markdown("Rivals", describe("x", []), [section])
    assert f"| 100 Mbit/s, 0 ms, all equal |{' 2 |' * len(in_cell)} 1.00 × | 0.67 × |" in words
    assert f"| 100 Mbit/s, 0 ms, all equal |{' – |' * (len(in_cell) + 2)}" in words
    assert "| 100 Mbit/s, 0 ms, all equal | 32 | 32 | 32 | 32 | 32 | 30 |" in words
    assert "Not run: 100 Mbit/s, 0 ms, one 4 × slower, 4 workers." in words
    count = len(done)
    Campaign(Journal(tmp_path / "journal.jsonl", Silent()), 4096, do=trained(done)).run([CELL])
    assert len(done) == count


@pytest.mark.long
def test_the_program_writes_its_report_and_goes_on_from_its_journal(tmp_path, network, monkeypatch, capsys):
    done = []
    monkeypatch.setattr(lab, "unavailable", lambda: "")
    monkeypatch.setattr(rivals, "train", trained(done))
    command = ["--quick", "--output", str(tmp_path / "output")]
    assert rivals.main(command) == 0
    written = (tmp_path / "output" / "report.md").read_text()
    assert "| 100 Mbit/s, 0 ms, all equal |" in written
    assert "100 Mbit/s, 0 ms" in capsys.readouterr().out
    count = len(done)
    assert rivals.main(command) == rivals.main([*command, "--report"]) == 0
    assert len(done) == count


def test_without_namespaces_the_program_says_why_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lab, "unavailable", lambda: "this needs root")
    assert rivals.main(["--quick", "--output", str(tmp_path)]) == 77
    assert "this needs root" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_cells_that_matter_most_come_first():
    assert len(cells(quick=True)) == 1
    every = cells(quick=False)
    assert len(set(every)) == len(every) == 43
    assert [*map(decides, every)] == [True] * 6 + [False] * 37
    assert {cell.workers for cell in every[:6]} == {8}


KINDS = ["rmsprop", "rounds", "but-one", "paced", "overlap", "ddp", "fp16", "power-1", "local", "diloco"]


@pytest.mark.parametrize(
    "contender",
    long_but(["rounds", "ddp"], KINDS),
)
def test_every_kind_of_worker_trains(contender):
    inner = "" if CONTENDERS[contender].method else "RMSprop"
    first, second = train(job_of(contender, inner, 0.125, 2, 0, 256))
    assert first.steps + second.steps >= (16 if contender in ("but-one", "paced") else 32)
    assert first.curve[0][0] == 8
    assert first.final < 5.6
    assert second.final == math.inf


@pytest.mark.parametrize("delay_ms", [0, 5])
def test_a_cell_has_hosts_that_reach_each_other(delay_ms):
    if reason := lab.unavailable():
        pytest.skip(reason)
    with CELL._replace(delay_ms=delay_ms, workers=2).network() as network:
        first, second = train(job_of("local", "SGD", 0.1, 2, 0, 256), network)
    assert first.ended.up > 4 * 198_976
    assert second.ended.down > 4 * 198_976


@pytest.mark.parametrize("contender", long_but(["local"], ["rmsprop", "rounds", "power-1", "local", "diloco"]))
def test_training_goes_on_when_a_worker_is_lost_and_another_comes(contender, monkeypatch):
    monkeypatch.setattr("benchmarks.rivals.cells.ABSENT_SECONDS", 0.5)
    is_ours = bool(CONTENDERS[contender].method)
    job = job_of(contender, "" if is_ours else "RMSprop", 0.125, 3, 0, 1152)
    told = train(replace(job, lost_at=8, back_at=0 if is_ours else 16))
    assert told[0].final < 5.6
    assert told[0].curve[0][0] == 8
    assert told[-1].steps  # of the one that has come
    if not is_ours:
        # 48 steps of three workers, 8 of which had two: the last batches take 3 steps more
        assert [each.steps for each in told] == [51, 51, 51 - 16]


def test_the_batches_of_a_worker_that_is_not_there_are_missing():
    job = replace(job_of("ddp", "SGD", 0.1, 4, 0, 4096), lost_at=10, back_at=16)
    assert [batches_before(job, step) for step in (0, 10, 13, 16, 20)] == [0, 40, 49, 58, 74]
    assert batches_before(replace(job, lost_at=0, back_at=0), 20) == 80


@pytest.mark.long
def test_in_a_cell_with_a_loss_rivals_train_to_the_end_and_the_new_worker_comes_in_time(tmp_path, network):
    done = []
    cell = CELL._replace(scenario="lost")
    campaign = Campaign(Journal(tmp_path / "journal.jsonl", Silent()), 65536, do=trained(done))
    campaign.run([cell])
    lost = {job.contender: job for job, is_in_network in done if is_in_network and job.lost_at}
    assert lost.keys() == CONTENDERS.keys() - {"most"}
    assert {job.lost_at for job in lost.values()} == {1024}
    assert lost["ddp"].back_at == 1024 + 336  # ten seconds of steps of 30 ms, and a multiple of 8
    assert lost["ddp"].steps == lost["ddp"].all_steps
    assert lost["rmsprop"].back_at == 0
    assert campaign.measured.keys() >= {(cell, key) for key in lost}
