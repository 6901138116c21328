"""``make release-check`` finds what a wheel must not be."""

import shutil
import zipfile
from pathlib import Path

import pytest

from tools import release_check


@pytest.fixture(name="wheel", scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release_check.build(tmp_path_factory.mktemp("dist"))


def problems_of(wheel: Path, folder: Path, *, without: str = "", more: dict[str, str] | None = None) -> list[str]:
    """What is found in a copy of a wheel without some files, and with others."""
    changed = folder / wheel.name
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(changed, "w") as target:
        for name in source.namelist():
            if not without or not name.endswith(without):
                target.writestr(name, source.read(name))
        for name, text in (more or {}).items():
            target.writestr(name, text)
    return list(release_check.contents_problems(changed))


def test_what_is_built_has_no_problem_and_a_source_distribution_beside_it(wheel, tmp_path):
    assert problems_of(wheel, tmp_path) == []
    assert len(list(wheel.parent.glob("*.tar.gz"))) == 1


@pytest.mark.parametrize(
    ("without", "more", "found"),
    [
        ("psclient/py.typed", {}, ["psclient is not marked as typed"]),
        ("licenses/LICENSE", {}, ["it has no licence"]),
        ("psservice/shard/push.py", {}, ["it lacks psservice/shard/push.py"]),
        ("", {"tests/test_x.py": ""}, ["it installs tests too", "it has tests: tests/test_x.py"]),
        ("", {"psclient/tests/x.py": ""}, ["it has tests: psclient/tests/x.py"]),
    ],
)
def test_a_wheel_with_a_fault_is_refused(wheel, tmp_path, without, more, found):
    assert problems_of(wheel, tmp_path, without=without, more=more) == found


def test_a_wheel_of_another_version_is_refused(wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(release_check, "_version", lambda: "9.9.9")
    (problem,) = problems_of(wheel, tmp_path)
    assert problem.startswith("it says version ")


@pytest.mark.long
def test_an_older_wheel_does_not_stay_beside_the_new_one(tmp_path, wheel):
    shutil.copy(wheel, tmp_path / "sparseps-0.0.1-py3-none-any.whl")
    release_check.build(tmp_path)
    assert [path.name for path in tmp_path.glob("*.whl")] == [wheel.name]
