"""Compiling at first use: once a function, wherever it can be cached, and never a reason to fail."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pscore.kernels import compiled
from pscore.kernels.compiled import compile_once


def double(number):
    return 2 * number


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    monkeypatch.setattr(compiled, "_compiled", {})


def test_a_function_is_compiled_once_whoever_asks():
    found = []
    threads = [threading.Thread(target=lambda: found.append(compile_once(double))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(each) for each in found}) == 1
    assert found[0](21) == 42
    assert found[0] is not double


@pytest.mark.parametrize("error", [ImportError("numba needs an older numpy"), OSError("no LLVM here")])
def test_where_numba_cannot_start_there_is_none(monkeypatch, caplog, error):
    def fail(name):
        raise error

    monkeypatch.setattr(compiled.importlib, "import_module", fail)
    assert compile_once(double) is None
    assert compile_once(double) is None
    assert caplog.text.count(str(error)) == 1


def in_a_fresh_process(code, **environment):
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_where_compiling_is_switched_off_there_is_none():
    code = "from pscore.codecs.index.rice.loops import compiled_steps; print(compiled_steps())"
    assert in_a_fresh_process(code, NUMBA_DISABLE_JIT="1") == "None"


def test_without_a_directory_for_the_cache_it_compiles_all_the_same():
    code = """
import numba.core.caching
import numpy
numba.core.caching.CacheImpl._locator_classes = []  # as where no directory can be written
from pscore.codecs.index.rice.loops import _plan
from pscore.kernels.compiled import compile_once
print(compile_once(_plan)(numpy.arange(5), numpy.empty(5, numpy.uint32), numpy.zeros(1, numpy.uint8)))
"""
    assert in_a_fresh_process(code) == "(5, 0, 0)"
