"""The quickstart's notebook: runs from top to bottom, leaves nothing behind, and is kept without outputs."""

import re

import pytest

from tests.system.scripts import EXAMPLES, ROOT, assert_none_left, marked

nbformat = pytest.importorskip("nbformat")
NOTEBOOK = EXAMPLES / "quickstart.ipynb"


def test_it_is_kept_without_outputs():
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        assert not cell.get("outputs"), "clear all outputs before committing"
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("folder", [EXAMPLES, ROOT], ids=["examples", "root"])
def test_it_finds_its_files_from(folder, monkeypatch):
    """The first cell, in both folders that people start Jupyter in; the other cells do not depend on it."""
    monkeypatch.chdir(folder)
    names = {}
    monkeypatch.setattr("sys.path", [])
    exec(nbformat.read(NOTEBOOK, as_version=4).cells[1].source, names)
    assert names["examples"] == EXAMPLES


@pytest.mark.long
@pytest.mark.timeout(600)
def test_it_runs_from_top_to_bottom(monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    environment, mark = marked(QUICKSTART_EPOCHS="1", QUICKSTART_WORKERS="1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=400, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    )
    client.execute(env=environment)
    text = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert float(re.search(r"test accuracy ([\d.]+)%", text)[1]) > 85
    steps = dict(re.findall(r"^(DGS|ASGD)\s+[\d.]+%\s+(\d+)", text, re.MULTILINE))
    assert steps == {"DGS": "44", "ASGD": "44"}
    assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))
    assert_none_left(mark)
