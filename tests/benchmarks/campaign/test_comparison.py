"""A comparison does each run once, in pairs, and goes on where it was interrupted."""

import json

import pytest

from benchmarks.campaign.comparison import SEARCH_SEED
from benchmarks.campaign.journal import Journal
from benchmarks.harness.children import ChildFailedError
from tests.benchmarks.campaign.campaign_makers import STAGES, Silent, comparison, outcome


class Workshop:
    """Counts the runs instead of doing them; breaks off at the one with a given number."""

    def __init__(self, broken_at=None, error=KeyboardInterrupt):
        self.done = []
        self._broken_at, self._error = broken_at, error

    def __call__(self, spec):
        if len(self.done) + 1 == self._broken_at:
            self._broken_at = None
            raise self._error
        self.done.append(spec)
        return outcome(loss=abs(spec.rate - 0.2), score=0.5 + spec.seed / 10)


def test_every_method_gets_the_same_seeds_and_samples(tmp_path):
    shop = Workshop()
    work = comparison(tmp_path / "runs.jsonl", shop)
    work.run(STAGES)
    finals = {}
    for run in work.counted:
        assert not run.spec.validation
        finals.setdefault((run.spec.method, run.spec.workers), []).append((run.spec.seed, run.spec.samples))
    assert finals == {
        key: [(0, 640), (1, 640)] for key in [("sgd", 1), ("dgs", 2), ("dgs", 4), ("asgd", 2), ("asgd", 4)]
    }
    assert {run.spec.seed for run in work.searched} == {SEARCH_SEED}
    assert all(run.spec.validation for run in work.searched)
    trials = [run.spec.method for run in work.searched]
    assert trials.count("dgs") == trials.count("asgd") == trials.count("sgd") == 5
    assert {run.spec.rate for run in work.counted} == {0.2}


def test_settings_come_from_the_next_number_of_workers_that_was_tuned(tmp_path):
    work = comparison(tmp_path / "runs.jsonl", Workshop())
    work.run(STAGES)
    assert {run.spec.workers for run in work.searched if run.spec.method == "dgs"} == {4}
    assert {run.spec.workers for run in work.searched if run.spec.method == "sgd"} == {1}


@pytest.mark.long
def test_an_interrupted_comparison_goes_on(tmp_path):
    path = tmp_path / "runs.jsonl"
    whole = Workshop()
    comparison(tmp_path / "other.jsonl", whole).run(STAGES)
    first = Workshop(broken_at=9)
    with pytest.raises(KeyboardInterrupt):
        comparison(path, first).run(STAGES)
    second = Workshop()
    work = comparison(path, second)
    work.run(STAGES)
    assert first.done + second.done == whole.done
    assert len(work.counted) == 10
    third = Workshop()
    comparison(path, third).run(STAGES)
    assert third.done == []


def test_a_failure_is_told_and_tried_again(tmp_path):
    path = tmp_path / "runs.jsonl"
    work = comparison(path, Workshop(broken_at=18, error=ChildFailedError("worker 1 did not answer")))
    work.run(STAGES)
    assert len(work.counted) == 9
    assert len(work.journal.failures) == 1
    assert work.journal.failures[0].endswith("worker 1 did not answer")
    again = Workshop()
    work = comparison(path, again)
    work.run(STAGES)
    assert len(again.done) == 1
    assert (len(work.counted), work.journal.failures) == (10, [])


def test_all_work_that_is_expected_is_accounted_for(tmp_path):
    work = comparison(tmp_path / "runs.jsonl", Workshop())
    work.run(STAGES)
    assert work.journal.watcher.over == pytest.approx(work.journal.watcher.planned)


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    path = tmp_path / "runs.jsonl"
    Journal(path, Silent()).once("a", "", 0.0, lambda: {"x": 1})
    with path.open("a") as file:
        file.write('{"key": "b", "val')
    reader = Journal(path, Silent(), does=False)
    assert [reader.once(key, "", 0.0, lambda: {"x": 3}) for key in "ab"] == [{"x": 1}, None]
    Journal(path, Silent()).once("b", "", 0.0, lambda: {"x": 2})
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == ["a", "b"]
