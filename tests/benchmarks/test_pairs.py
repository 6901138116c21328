"""The section that compares with another checkout: its rows, its order, its child processes, and a small run."""

import json

import pytest

from benchmarks import pairs
from benchmarks.harness.section import Plan
from benchmarks.pairs import Checkout, Measurement, ProbeError, lines, measurements
from benchmarks.workload.layouts import one_tensor, resnet_small

ROW = Measurement("calls", {}, {"cpu_ms": "server CPU, ms"})


def test_rows_are_medians_with_their_range_and_ratios_of_pairs():
    seen = [({"cpu_ms": 9.0}, {"cpu_ms": 3.0}), ({"cpu_ms": 2.0}, {"cpu_ms": 4.0}), ({"cpu_ms": 4.0}, {"cpu_ms": 2.0})]
    assert lines(ROW, seen) == [("server CPU, ms", "4 (2–9)", "3 (2–4)", "×0.5 (0.333–2)", "3")]
    assert lines(ROW, [({}, {"cpu_ms": 1.0})]) == [("server CPU, ms", "", "", "", "0")]


def test_the_small_model_is_that_of_the_row():
    layout = resnet_small()
    assert (len(layout.parameters), layout.size) == (62, 177_362)


def test_a_base_that_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(ProbeError, match="no folder psservice"):
        Checkout(tmp_path)


@pytest.mark.long
@pytest.mark.executes_python
def test_a_probe_that_fails_is_told_in_its_own_words():
    with Checkout() as here, pytest.raises(ProbeError, match="unexpected keyword argument 'nonsense'"):
        here.probe("calls", {"nonsense": 1})


@pytest.mark.executes_python
def test_a_probe_finds_the_packages_and_load_generators_of_its_checkout_and_writes_nothing_there(tmp_path):
    for package in ("psservice", "pscore", "benchmarks"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("here = 'other'")
    code = "import benchmarks, json, pscore; print(json.dumps({'other': benchmarks.here == pscore.here == 'other'}))"
    with Checkout(tmp_path) as base:
        assert base.execute(["-c", code], 60) == {"other": True}
    assert not list(tmp_path.rglob("__pycache__"))


def test_both_run_as_often_as_asked_in_both_orders_and_a_failing_probe_is_a_note(tmp_path, monkeypatch):
    order = []

    def probe(checkout, name, arguments):
        if name == "steps":
            raise ProbeError("no such layout")
        if arguments.get("workers") == 1:
            order.append("base" if checkout.root == tmp_path.resolve() else "here")
        return {"cpu_ms": 2.0 if checkout.root == tmp_path.resolve() else 1.0}

    (tmp_path / "psservice").mkdir()
    monkeypatch.setattr(Checkout, "probe", probe)
    monkeypatch.setattr(Checkout, "warm_up", lambda checkout: None)
    plan = Plan(True, one_tensor(10), "", 0.01, 3, 3, 0, lambda what: None, base=tmp_path, times=3)
    done = pairs.run(plan)
    rows = {row[0]: row[1:] for row in done.tables[0].rows}
    text = next(iter(measurements(quick=True)[0].rows.values()))
    assert rows[text] == ("2 (2–2)", "1 (1–1)", "×0.5 (0.5–0.5)", "3")
    assert order == ["base", "here", "here", "base", "base", "here"]
    assert sum("no such layout" in note for note in done.notes) == 3
    json.dumps(done.figures)


def test_rows_have_names_of_their_own():
    for quick in (True, False):
        texts = [text for each in measurements(quick=quick) for text in each.rows.values() if not text.startswith(" ")]
        assert len(set(texts)) == len(texts)


@pytest.mark.executes_python
@pytest.mark.long
@pytest.mark.timeout(400)
def test_workers_exchange_with_a_server():
    with Checkout() as here:
        found = here.probe("calls", {"size": 5_000, "workers": 2, "seconds": 0.3})
    assert min(found["rate"], found["cpu_ms"]) > 0
