"""The section that compares with an older checkout: its arithmetic, its child processes, its echo, and a small run."""

import json
from dataclasses import replace

import pytest

from benchmarks.harness.section import Plan
from benchmarks.short_way import section
from benchmarks.short_way.checkout import Checkout, ProbeError
from benchmarks.short_way.rows import BULK, SERVER_CPU, STEP, Found, Row, at_least, at_most, number
from benchmarks.short_way.section import Measurement, found
from benchmarks.workload.layouts import one_tensor, resnet_small

PLAN = Plan(True, one_tensor(10), "", 0.01, 3, 3, 0, lambda what: None)
ROW = Row("server CPU, ms", "cpu_ms", at_most(3, "anchor"), 2.8, "cpu_ms")


@pytest.mark.parametrize(
    ("target", "after", "reached"),
    [
        (at_most(2), 2.0, True),
        (at_most(2), 2.1, False),
        (at_least(2), 1.9, False),
        (at_most(3, "anchor"), 6.0, True),
        (at_most(3, "anchor"), 6.1, False),
        (at_least(5, "before"), 50.0, True),
        (at_least(5, "before"), 49.0, False),
    ],
)
def test_a_target_is_absolute_or_a_multiple(target, after, reached):
    assert target.reached(after, before=10.0, anchor=2.0) is reached


def test_a_multiple_of_nothing_is_neither_reached_nor_missed():
    assert at_most(3, "anchor").reached(1.0, before=1.0, anchor=None) is None
    assert at_least(5, "before").reached(1.0, before=None, anchor=1.0) is None


def test_a_row_has_before_after_anchor_and_their_ratio():
    assert Found(10.0, 5.0, 2.0).cells(ROW) == ("10", "5", "2", "×0.5", "≤ 3 × anchor", "yes")


def test_a_known_figure_stands_in_brackets_and_serves_as_before():
    assert Found(None, 5.0, 1.0).cells(ROW) == ("(2.8)", "5", "1", "", "≤ 3 × anchor", "no")
    rate = Row("rate", "rate", at_least(5, "before"), 350)
    assert Found(None, 2000.0, None).cells(rate)[-1] == "yes"
    assert Found(None, None, None).cells(replace(rate, known=None)) == ("", "", "", "", "≥ 5 × before", "")


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), (0.0, "0"), (0.12345, "0.123"), (999.0, "999"), (1e6, "1,000,000")]
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def test_rows_are_medians_of_the_rounds():
    each = Measurement((ROW,), "calls", {}, {}, 3)
    each.before += [{"cpu_ms": 9.0}, {"cpu_ms": 3.0}, {"cpu_ms": 4.0}]
    each.after += [{"cpu_ms": 1.0}, {"cpu_ms": 2.0}]
    each.anchors += [{"cpu_ms": 0.5}]
    assert found(ROW, each) == Found(4.0, 1.5, 0.5)
    assert found(replace(ROW, figure="other"), each) == Found(None, None, 0.5)


def test_without_a_run_of_its_own_the_anchor_is_a_figure_of_the_probe():
    each = Measurement((ROW,), "steps", {})
    each.after.append({"wall_copies": 5.0, "copy_ms": 20.0})
    assert found(Row("step", "wall_copies", at_most(7), anchor="copy_ms"), each) == Found(None, 5.0, 20.0)


def test_the_small_model_is_that_of_the_row():
    layout = resnet_small()
    assert (len(layout.parameters), layout.size) == (62, 177_362)


def test_a_base_that_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(ProbeError, match="no folder psservice"):
        Checkout(tmp_path)


@pytest.mark.executes_python
def test_a_probe_that_fails_is_told_in_its_own_words():
    with Checkout() as here, pytest.raises(ProbeError, match="unexpected keyword argument 'nonsense'"):
        here.probe("calls", {"nonsense": 1}, 60)


@pytest.mark.executes_python
def test_probes_of_a_base_import_its_packages_under_the_present_names(tmp_path):
    """A checkout with the names of 7cc8f91: no ``pscore.wire``, and a segment where there is a sparse slice now."""
    for name, text in {
        "psservice/__init__.py": "",
        "pscore/__init__.py": "",
        "pscore/frames.py": "here = 'old'",
        "pscore/segment.py": "class Segment: pass",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "probe").mkdir()
    probe = tmp_path / "probe" / "x.py"
    probe.write_text(
        "import json, pscore.frames\n"
        "from pscore.model.sparse_slice import SparseSlice\n"
        "from pscore.wire import frames\n"
        "assert frames is pscore.frames\n"
        "print(json.dumps({'old': frames.here == 'old' and SparseSlice.__name__ == 'Segment'}))\n"
    )
    with Checkout(tmp_path) as base:
        found = base.execute([str(probe)], [base._here.name, str(tmp_path)], 60)
    assert found == {"old": True}
    assert not list(tmp_path.rglob("__pycache__"))


def test_a_section_fills_its_rows_and_a_failing_probe_is_a_note(monkeypatch):
    def probe(checkout, name, arguments, seconds):
        if name == "steps":
            raise ProbeError("no such layout")
        if "echo_bytes" in arguments:
            assert arguments["echo_bytes"] == 5000
            return {"cpu_ms": 0.5, "rate": 2000.0}
        return {"cpu_ms": 1.0, "rate": 800.0, "reply_bytes": 5000, "upload": 900.0}

    monkeypatch.setattr(Checkout, "probe", probe)
    monkeypatch.setattr(Checkout, "warm_up", lambda checkout, seconds: None)
    done = section.run(PLAN)
    rows = {row[0]: row[1:] for row in done.tables[0].rows}
    assert rows[SERVER_CPU[0].text] == ("(2.8)", "1", "0.5", "", "≤ 3 × anchor", "yes")
    assert rows[BULK[0].text] == ("(65)", "900", "", "", "≥ 1000", "no")
    assert rows[STEP[0].text] == ("(20)", "", "", "", "≤ 7", "")
    assert any("no such layout" in note for note in done.notes)
    assert any(note.startswith("Not measured") and STEP[0].text in note for note in done.notes)
    json.dumps(done.figures)


def test_quick_and_full_measure_the_same_rows():
    quick, full = section.measure_quick(), section.measure_full()
    assert [each.rows for each in quick] == [each.rows for each in full]
    texts = [row.text for each in quick for row in each.rows if not row.text.startswith(" ")]
    assert len(set(texts)) == len(texts)


@pytest.mark.executes_python
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_workers_exchange_with_a_server_and_with_its_echo():
    calls = {"size": 5_000, "workers": 2, "seconds": 0.3}
    with Checkout() as here:
        served = here.probe("calls", calls, 300)
        echoed = here.probe("calls", calls | {"echo_bytes": served["reply_bytes"]}, 300)
    assert min(served["rate"], echoed["rate"], served["reply_bytes"]) > 0
    assert echoed["reply_bytes"] == pytest.approx(served["reply_bytes"], abs=1)
