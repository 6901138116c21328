"""Importing a package loads nothing heavy and starts nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.executes_python

ROOT = Path(__file__).resolve().parents[2]

PROBE = """
import json, sys, threading
import {package}
heavy = [name for name in ("torch", "grpc", "numpy", "numba", "pydantic", "safetensors") if name in sys.modules]
print(json.dumps([heavy, threading.active_count()]))
"""


@pytest.mark.parametrize("package", ["pscore", "psservice", "psclient"])
def test_importing_a_package_loads_no_torch_and_starts_no_thread(package):
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(package=package)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert json.loads(done.stdout) == [[], 1]


LAZY = """
import sys
from pscore.wire import frames
print("numba" in sys.modules)
"""


@pytest.mark.long
def test_importing_the_codecs_loads_no_compiler():
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "False"


@pytest.mark.long
def test_triton_is_loaded_by_the_first_selection_and_not_by_an_import():
    probe = "import sys, pscore.selection.cuda.launches; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", probe], check=True, cwd=ROOT)
