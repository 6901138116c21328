"""What a training loop prints and logs of its steps."""

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

import psclient
from psclient.errors import ConfigurationError
from psclient.rpc.local_server import LocalServer
from tests.system.tools import QUICK, make_data, make_model, train_step

TRAINING = Path(__file__).parents[3] / "docs" / "guide" / "training.md"


@pytest.fixture(scope="module")
def optimizer():
    """After two steps."""
    model, data = make_model(), make_data()
    with (
        LocalServer() as server,
        psclient.DGS(model.parameters(), lr=0.1, density=0.01, model=model, server=server, settings=QUICK) as made,
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


class Writer:
    """What TensorBoard's ``SummaryWriter`` and ``wandb`` take, where they are not installed."""

    def __init__(self):
        self.rows = {}

    def add_scalar(self, name, value, step):
        self.rows[name] = (value, step)

    def log(self, row):
        assert all(isinstance(name, str) and isinstance(value, float) for name, value in row.items())
        self.rows |= row


def recipe(number):
    """Return the lines of docs/guide/training.md that log to TensorBoard (0) or W&B (1)."""
    section = TRAINING.read_text().split("## What a step did\n")[1].split("\n## ")[0]
    return section.split("```python\n")[1].split("```")[0].strip().split("\n\n")[1 + number]


def test_the_recipe_for_tensorboard_writes_every_number(optimizer, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        exec(recipe(0), {"psclient": psclient, "optimizer": optimizer, "writer": writer})
    events = accumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == set(psclient.scalars(optimizer))
    (written,) = events.Scalars("psclient/push_bytes")
    assert (written.step, written.value) == (2, optimizer.report.push_bytes)


@pytest.mark.parametrize(("number", "name"), [(0, "writer"), (1, "wandb")])
def test_the_recipes_fit_a_logger_of_the_same_form(optimizer, number, name):
    writer = Writer()
    exec(recipe(number), {"psclient": psclient, "optimizer": optimizer, name: writer})
    assert set(writer.rows) == set(psclient.scalars(optimizer))


def test_scalars_are_the_numbers_of_report_and_totals(optimizer):
    found = psclient.scalars(optimizer)
    assert found["psclient/push_bytes"] == optimizer.report.push_bytes
    assert found["psclient/wait_seconds"] == optimizer.report.seconds["wait"]
    assert found["psclient/total_samples"] == optimizer.totals.samples
    assert "psclient/reply_mode" not in found
    assert {type(value) for value in found.values()} == {float}


def test_scalars_look_into_the_optimizers_of_other_libraries(optimizer):
    wrapped = SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer))
    assert psclient.scalars(wrapped) == psclient.scalars(optimizer)
    with pytest.raises(ConfigurationError, match="MomentumSGD: pass one of psclient's"):
        psclient.scalars(psclient.MomentumSGD(make_model().parameters(), lr=0.1))


@pytest.mark.parametrize("kind", ["StepReport", "Totals"])
def test_the_docstring_has_every_field(kind):
    for field in fields(getattr(psclient, kind)):
        assert f"\n        {field.name}: " in getattr(psclient, kind).__doc__, field.name
