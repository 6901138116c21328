"""Thousands of nearly right chunks for each codec: refused in the protocol's words, or all that they should be.

The same ones every time. ``make fuzz`` looks for others, guided by what they reach.
"""

import tracemalloc

import pytest

from tests.hostile.corpus_files import FOLDERS
from tests.hostile.mutation import campaign, changed, good_chunks, outcome
from tests.hostile.oracle import decode_alike

ROUNDS = 1500


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


@pytest.mark.parametrize("codec", ["rice", "raw32", "bitmap", "fp32", "int8", "int4"])
def test_compiled_loops_and_numpy_agree_on_changed_chunks(codec):
    for chunk in changed(codec, 300, seed=3):
        decode_alike(chunk)
