"""Thousands of nearly right chunks for each codec: refused in the protocol's words, or all that they should be.

The same ones every time. ``make fuzz`` looks for others, guided by what they reach.
"""

import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from tests.hostile.corpus_files import FOLDERS
from tests.hostile.mutation import campaign, changed, good_chunks, outcome
from tests.hostile.oracle import decode_alike

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 1500

LITTLE_MEMORY = """
import resource
from tests.hostile.corpus_files import corpus
from tests.hostile.mutation import campaign, good_chunks, outcome

for chunk in good_chunks():
    assert outcome(chunk) == "taken"
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20),) * 2)
for hostile in corpus():
    assert outcome(hostile.chunk) == hostile.reason.name, hostile
for codec in ("pcodec", "streamvbyte"):
    campaign(codec, 3000, seed=2)
print("ok")
"""
"""What compiled libraries allocate is invisible to tracemalloc; so they are given no more than so much."""


@pytest.fixture
def traced():
    """Python's allocations are counted."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("codec", FOLDERS)
def test_good_chunks_are_taken(codec):
    chunks = good_chunks(codec)
    assert chunks
    assert {outcome(chunk) for chunk in chunks} == {"taken"}


@pytest.mark.parametrize("codec", FOLDERS)
def test_changed_chunks_are_refused_or_keep_every_promise_within_memory(codec, traced):
    outcomes = campaign(codec, ROUNDS, seed=1)
    assert outcomes["taken"] >= ROUNDS // 50, "too few come through to be checked"
    assert outcomes["BAD_CHUNK"] >= ROUNDS // 5
    assert outcomes["UNKNOWN_CODEC"]
    assert outcomes["NON_FINITE"]


@pytest.mark.parametrize("codec", ["rice", "int8", "int4"])
def test_compiled_loops_and_numpy_agree_on_changed_chunks(codec):
    for chunk in changed(codec, 300, seed=3):
        decode_alike(chunk)


@pytest.mark.skipif(sys.platform != "linux", reason="limits its own address space, which needs Linux")
def test_no_compiled_library_allocates_what_a_hostile_chunk_asks_for():
    done = subprocess.run([sys.executable, "-c", LITTLE_MEMORY], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.stdout.strip() == "ok", done.stdout + done.stderr
