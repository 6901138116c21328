"""What a training loop prints and logs of its steps."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

import psclient
from psclient.local import LocalServer
from tests.system.tools import QUICK, make_data, make_model, train_step

API = Path(__file__).parents[2] / "docs" / "api.md"


@pytest.fixture(scope="module")
def optimizer():
    """After two steps."""
    model, data = make_model(), make_data()
    with (
        LocalServer() as server,
        psclient.DGS(model.parameters(), lr=0.1, model=model, server=server, settings=QUICK) as made,
    ):
        for _ in range(2):
            train_step(model, made, *data)
        yield made


def test_a_report_prints_as_one_line(optimizer):
    line = str(optimizer.report)
    assert line.startswith("step 2, version 2, staleness 0: pushed ")
    assert ", pulled " in line
    assert "(exact), " in line
    assert " ms (select " in line
    assert "\n" not in line
    assert len(line) < 200


def test_totals_print_as_one_line(optimizer):
    line = str(optimizer.totals)
    assert line.startswith(f"{optimizer.totals.samples:,} samples: pushed ")
    assert "\n" not in line


def test_a_report_is_a_flat_dict_of_plain_values_for_loggers(optimizer):
    report = optimizer.report
    found = report.as_dict()
    assert found["push_bytes"] == report.push_bytes > 0
    assert found["wait_seconds"] == report.seconds["wait"]
    assert {name for name, value in found.items() if not isinstance(value, int | float)} == {"reply_mode"}
    assert json.loads(json.dumps(found)) == found
    assert optimizer.totals.as_dict()["push_bytes"] == optimizer.totals.push_bytes


@pytest.mark.parametrize("kind", ["StepReport", "Totals"])
def test_the_api_page_has_every_field(kind):
    section = API.read_text().split(f"### `psclient.{kind}`\n")[1].split("\n### ")[0]
    for field in fields(getattr(psclient, kind)):
        assert f"- `{field.name}`: " in section, field.name
