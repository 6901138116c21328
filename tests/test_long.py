"""Long tests are left out, which the last lines of a run say; they run if asked for, or if their module is named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULE = """
import pytest

@pytest.mark.long
@pytest.mark.parametrize("number", range(3))
def test_that_is_long(number):
    pass

def test_that_is_not():
    pass
"""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "1 passed, 3 skipped"),
        (["--long"], "4 passed"),
        (["tests/test_few.py"], "4 passed"),
        (["--numprocesses", "1", "tests"], "4 passed"),
    ],
    ids=" ".join,
)
def test_they_run_if_asked_for_or_named(arguments, told, tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\naddopts = -ra\nmarkers = long\n")
    (tmp_path / "conftest.py").write_text("from tests.conftest import *")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_few.py").write_text(MODULE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    *_, before, closing = done.stdout.splitlines()
    assert f" {told} in " in closing, done.stdout + done.stderr
    assert ("3" in before and "make test LONG=1" in before) == ("skipped" in told), before
