"""The structure that docs/internals/architecture.md promises: arrows point down."""

import pytest

from tools.house import ROOMS, arrows, floors, modules, upward

packages = pytest.mark.parametrize("package", ROOMS)


@packages
def test_imports_point_down_and_run_in_no_circle(package):
    assert upward(package) == []
    floors(package)  # raises if rooms import in a circle


def test_packages_do_not_import_one_another_but_the_core():
    for package, others in (
        ("pscore", ("psclient", "psservice")),
        ("psclient", ("psservice",)),
        ("psservice", ("psclient",)),
    ):
        text = "\n".join(path.read_text(encoding="utf-8") for path in modules(package).values())
        assert [other for other in others if f"from {other}" in text or f"import {other}" in text] == []


def test_an_import_that_points_up_and_a_circle_are_found(tmp_path):
    for room in ("shard", "model"):
        (tmp_path / "psservice" / room).mkdir(parents=True)
    (tmp_path / "psservice" / "shard" / "push.py").write_text("from psservice.model.buffers import BufferAverage\n")
    (tmp_path / "psservice" / "model" / "buffers.py").write_text("def f():\n    import psservice.shard.push\n")
    assert arrows("psservice", tmp_path).keys() == {("shard", "model"), ("model", "shard")}
    assert [line.split(":")[0] for line in upward("psservice", tmp_path)] == ["model imports shard"]
    with pytest.raises(ValueError, match="model → shard → model"):
        floors("psservice", tmp_path)
