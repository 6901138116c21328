"""Background work: the loops are compiled before a push asks for them, freed memory goes back, and the thread ends."""

import threading

import pytest

from psservice.app import background


def test_it_warms_up_trims_and_ends(monkeypatch):
    trimmed = threading.Event()
    monkeypatch.setattr(background, "TRIM_SECONDS", 0.01)
    monkeypatch.setattr(background, "_malloc_trim", lambda: trimmed.set)
    chores = background.Background(lambda: 10**6)
    assert trimmed.wait(60)
    chores.close()
    assert "background" not in [thread.name for thread in threading.enumerate()]


def test_a_failing_warm_up_is_logged_and_no_more(monkeypatch, caplog):
    def fail():
        raise OSError("no compiler")

    monkeypatch.setattr(background, "warm_up", fail)
    trimmed = threading.Event()
    monkeypatch.setattr(background, "TRIM_SECONDS", 0.01)
    monkeypatch.setattr(background, "_malloc_trim", lambda: trimmed.set)
    chores = background.Background(lambda: 10**6)
    assert trimmed.wait(60)
    chores.close()
    assert "could not be compiled ahead" in caplog.text


def test_a_small_model_compiles_nothing_and_an_unknown_one_is_waited_for(monkeypatch):
    monkeypatch.setattr(background, "warm_up", lambda: pytest.fail("compiled"))
    monkeypatch.setattr(background, "_malloc_trim", lambda: None)
    for size in (0, 100):
        chores = background.Background(lambda size=size: size)
        chores.close()


def test_a_c_library_without_trimming_is_no_reason_to_fail(monkeypatch):
    monkeypatch.setattr(background.ctypes, "CDLL", lambda name: object())
    assert background._malloc_trim() is None


def test_this_c_library_trims():
    trim = background._malloc_trim()
    assert trim is None or trim() in (0, 1)
