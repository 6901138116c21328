"""Compiling at the first call: once a function, wherever it can be cached; the cache is never a reason to fail."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pscore.jit import compiled
from tests.tiers import long_but

pytestmark = pytest.mark.executes_python


def double(number):
    return 2 * number


def triple(number):
    return 3 * number


@compiled
def quadruple(number):
    return doubled(doubled(number))


@compiled
def doubled(number):
    return 2 * number


def test_a_loop_may_call_another_of_its_file():
    assert quadruple(3) == quadruple.function(3) == 12


def test_a_function_is_compiled_once_whoever_asks():
    loop, found = compiled(double), []
    threads = [threading.Thread(target=lambda: found.append(loop.dispatcher)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(each) for each in found}) == 1
    assert loop(21) == 42
    assert found[0] is not double


def in_a_fresh_process(code, *, whole=False, **environment):
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), **environment},
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done if whole else done.stdout.strip()


def test_a_thread_that_needs_loops_while_another_imports_numba_waits_for_it():
    code = """
import importlib, sys, threading
outcomes = []
def load(name):
    try:
        importlib.import_module(name)
    except Exception as error:
        outcomes.append(error)
second = threading.Thread(target=load, args=["pscore.selection.host.update_loops"])
class InTheMiddle:
    def find_spec(self, name, path, target=None):
        if name == "numba.core.config" and not second.ident:
            second.start()
            second.join(1)  # it does not end: it waits
sys.meta_path.insert(0, InTheMiddle())
load("numba")
second.join()
print(outcomes)
"""
    assert in_a_fresh_process(code) == "[]"


def test_where_compiling_is_switched_off_loops_are_functions():
    code = "from pscore.wire.codecs.index_loops import read_rice as read; print(read.dispatcher is read.function)"
    assert in_a_fresh_process(code, NUMBA_DISABLE_JIT="1") == "True"


@pytest.mark.long
def test_without_a_directory_for_the_cache_it_compiles_all_the_same():
    code = """
import numba.core.caching
import numpy
numba.core.caching.CacheImpl._locator_classes = []  # as where no directory can be written
from pscore.wire.codecs.value_loops import read_fp32
print(read_fp32(numpy.zeros(20, numpy.uint8), numpy.empty(5, numpy.int32)))
"""
    assert in_a_fresh_process(code) == "True"


FULL = """
import logging, os, sys
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stderr)
import numba.core.caching as caching
from pscore.jit import compiled
from tests.pscore.selection import test_jit as loops

def full(*_, **__):
    raise OSError(28, "No space left on device", "cache")

double, triple = compiled(loops.double), compiled(loops.triple)
{failure}
print(double(21), double(2.5), triple(5), double(4))
print([len(loop.dispatcher.signatures) for loop in (double, triple)])
"""

FAILURES = {
    "opening": "caching.IndexDataCacheFile._open_for_write = full",
    "replacing": "os.replace = full",
    "reading the index": "caching.IndexDataCacheFile._load_index = full",
    "the directory": "caching._CacheLocator.ensure_cache_path = full",
    "the directory, later": """
double.dispatcher, triple.dispatcher
caching._CacheLocator.ensure_cache_path = full
""",
    "in the middle": """
class Full:
    def __init__(self, file): self.file = file
    def write(self, data): self.file.write(data[: len(data) // 2]); full()
    def __getattr__(self, name): return getattr(self.file, name)
    def __enter__(self): return self
    def __exit__(self, *_): self.file.close()
caching.open = lambda path, mode="r": Full(open(path, mode)) if "w" in mode else open(path, mode)
""",
}


@pytest.mark.parametrize(
    "failure",
    long_but(["replacing"], FAILURES),
)
def test_a_cache_that_cannot_be_used_never_ends_anything(failure, tmp_path):
    done = in_a_fresh_process(FULL.format(failure=FAILURES[failure]), whole=True, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.stdout.split("\n")[:2] == ["42 5.0 15 8", "[2, 1]"], "compiled once for each combination of types"
    told = [line for line in done.stderr.split("\n") if "cache" in line]
    assert len(told) == 1, done.stderr
    assert told[0].startswith("WARNING")
    assert ("any directory" if failure == "the directory" else "No space left on device") in told[0]
    assert "NUMBA_CACHE_DIR" in told[0]
    assert not list(tmp_path.rglob("*.tmp.*")), "no half of a file stays behind"


@pytest.mark.parametrize(
    "damage",
    [pytest.param(lambda data: b"", marks=pytest.mark.long), lambda data: data[: len(data) // 2]],
    ids=["empty", "half"],
)
@pytest.mark.parametrize("suffix", long_but(["nbc"], ["nbi", "nbc"]))
def test_a_damaged_cache_is_compiled_again(suffix, damage, tmp_path):
    code = FULL.format(failure="")
    for _ in range(2):
        done = in_a_fresh_process(code, whole=True, NUMBA_CACHE_DIR=str(tmp_path))
        assert done.stdout.split("\n")[0] == "42 5.0 15 8", done.stderr
        files = list(tmp_path.rglob(f"*.{suffix}"))
        assert files
        for file in files:
            file.write_bytes(damage(file.read_bytes()))


def test_the_cache_is_used_and_that_something_is_compiled_is_said_once(tmp_path):
    code = """
import logging, sys
logging.basicConfig(level="INFO", stream=sys.stderr)
from pscore.jit import compiled
from tests.pscore.selection import test_jit as loops
double, triple = compiled(loops.double), compiled(loops.triple)
double(21), triple(7)
for loop in (double, triple):
    print(sum(loop.dispatcher.stats.cache_hits.values()), sum(loop.dispatcher.stats.cache_misses.values()))
"""
    for found, said in (("0 1\n0 1\n", 1), ("1 0\n1 0\n", 0)):
        done = in_a_fresh_process(code, whole=True, NUMBA_CACHE_DIR=str(tmp_path))
        assert (done.stdout, done.stderr.count("compiling loops")) == (found, said), done.stderr


COUNTED = """
import numba.core.compiler, pathlib, sys
compiled_here = numba.core.compiler.compile_extra
def count(*arguments, **named):
    with pathlib.Path(sys.argv[1]).open("a") as file:
        file.write("compiled\\n")
    return compiled_here(*arguments, **named)
numba.core.compiler.compile_extra = count
from pscore.jit import compiled
from tests.pscore.selection.test_jit import triple
print(compiled(triple)(5))
"""


@pytest.mark.long
def test_of_several_processes_one_compiles_and_the_others_wait_for_it(tmp_path):
    """And a lock that nobody holds any more, after a process was killed, keeps nobody."""
    root, counts = Path(__file__).resolve().parents[3], tmp_path / "counts"
    environment = {**os.environ, "PYTHONPATH": str(root), "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COUNTED, str(counts)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) for _ in range(3)]
    assert [process.communicate(timeout=100)[0].strip() for process in processes] == ["15"] * 3
    assert counts.read_text().split() == ["compiled"]
    assert list(tmp_path.rglob("*.lock")), "it stays behind, and is taken by the next"


@pytest.mark.long
def test_after_an_error_of_the_compiler_the_file_is_free_for_others(tmp_path):
    code = """
import fcntl, os, pathlib
from pscore.jit import compiled
from tests.pscore.selection.test_jit import triple
try:
    compiled(triple)(object())
except Exception as error:
    print(type(error).__name__)
(path,) = pathlib.Path(os.environ["NUMBA_CACHE_DIR"]).rglob("*.lock")
fcntl.flock(path.open("w"), fcntl.LOCK_EX | fcntl.LOCK_NB)
"""
    assert in_a_fresh_process(code, NUMBA_CACHE_DIR=str(tmp_path)) == "TypingError"


@pytest.mark.long
def test_loops_that_came_with_an_installation_that_is_not_this_users_are_used(tmp_path):
    code = """
import os, numba.core.caching as caching
from pscore.jit import compiled
from tests.pscore.selection import test_jit as loops
loops.double.__code__ = loops.double.__code__.replace(co_filename={file!r})
if {installed}:
    os.access = lambda path, mode: False
    {broken}
loop = compiled(loops.double)
loop(21)
print(sum(loop.dispatcher.stats.cache_hits.values()))
"""
    file = tmp_path / "installed.py"
    file.write_bytes(Path(__file__).read_bytes())
    no_directory = "caching.CacheImpl._locator_classes = []"
    assert in_a_fresh_process(code.format(file=str(file), installed=False, broken="")) == "0"
    elsewhere = {"NUMBA_CACHE_DIR": str(tmp_path / "own")}
    assert in_a_fresh_process(code.format(file=str(file), installed=True, broken="pass"), **elsewhere) == "1"
    assert in_a_fresh_process(code.format(file=str(file), installed=True, broken=no_directory)) == "1"
