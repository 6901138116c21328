"""Thousands of nearly right chunks for each codec: refused in the protocol's words, or all that they should be.

The same ones every time. ``make fuzz`` looks for others, guided by what they reach.
"""

import contextlib
import importlib.util
import random
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.hostile import corpus_files
from tests.hostile.corpus_files import FOLDERS
from tests.hostile.mutation import campaign, changed, good_chunks, outcome
from tests.hostile.oracle import decode_alike
from tests.tiers import long_but
from tools import fuzz_codecs

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


@pytest.mark.parametrize(
    "codec",
    long_but(list(FOLDERS)[::5], FOLDERS),
)
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


class Fuzzer:
    """Stands for atheris, and is guided by nothing: 10 changes of each seed, the last of which counts as a crash."""

    @staticmethod
    def instrument_imports(**_):
        return contextlib.nullcontext()

    @staticmethod
    def Mutate(data, most):  # noqa: N802
        return bytes(reversed(data))[:most]

    def Setup(self, command, try_one, custom_mutator):  # noqa: N802
        self.folders = [Path(word) for word in command[1:] if not word.startswith("-")]
        (prefix,) = [word.partition("=")[2] for word in command if word.startswith("-artifact_prefix=")]
        self.crashes, self.try_one, self.mutate = Path(prefix), try_one, custom_mutator

    def Fuzz(self):  # noqa: N802
        reached, beginning = self.folders
        seeds, chance = [path.read_bytes() for path in sorted(beginning.iterdir())], random.Random(0)
        for number, data in enumerate(seeds):
            for _ in range(10):
                new = self.mutate(data, fuzz_codecs.MOST_BYTES, chance.randrange(1 << 30))
                self.try_one(new)
            (reached / str(number)).write_bytes(new)
        (self.crashes / "crash-1").write_bytes(new)


@pytest.mark.long
def test_the_fuzzer_begins_with_seeds_and_writes_findings_and_new_files_of_the_corpus(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "atheris", Fuzzer())
    monkeypatch.setattr(corpus_files, "CORPUS", tmp_path / "corpus")
    for folder in FOLDERS:
        (tmp_path / "corpus" / folder).mkdir(parents=True)

    def fuzz_here(command, cwd):
        monkeypatch.setattr(sys, "argv", command[2:])
        return SimpleNamespace(returncode=fuzz_codecs.main())

    monkeypatch.setattr(fuzz_codecs.subprocess, "run", fuzz_here)
    monkeypatch.setattr(
        sys, "argv", ["fuzz", "--seconds", "1", "--codec", "rice", "--keep", "2", "--output", str(tmp_path / "runs")]
    )
    try:
        assert fuzz_codecs.main() == 0
    finally:
        tracemalloc.stop()
    assert f"1 findings in {tmp_path / 'runs' / 'findings'}" in capsys.readouterr().out
    assert "index_codec" in (tmp_path / "runs" / "findings" / "crash-1.textproto").read_text()
    kept = corpus_files.corpus()
    assert len(kept) == 2
    assert all(outcome(each.chunk) == each.reason.name for each in kept)


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
def test_a_second_of_the_fuzzer_finds_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fuzz", "--seconds", "1", "--codec", "rice", "--output", str(tmp_path)])
    assert fuzz_codecs.main() == 0
    assert "0 findings" in capsys.readouterr().out


@pytest.mark.skipif(importlib.util.find_spec("atheris") is not None, reason="atheris is installed")
def test_without_atheris_the_fuzzer_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fuzz"])
    assert fuzz_codecs.main() == 2
    assert "pip install" in capsys.readouterr().err
