"""Maintenance: the loops are compiled before a push asks for them, freed memory goes back, and the thread ends."""

import threading

import pytest

from pscore import jit, malloc
from psservice import warmup
from psservice.process import maintenance


def test_it_warms_up_trims_and_ends(monkeypatch):
    trimmed = threading.Event()
    monkeypatch.setattr(maintenance, "TRIM_SECONDS", 0.01)
    monkeypatch.setattr(maintenance, "trimming", lambda: trimmed.set)
    thread = maintenance.MaintenanceThread(lambda: 10**6)
    assert trimmed.wait(60)
    thread.close()
    assert "maintenance" not in [each.name for each in threading.enumerate()]


def test_a_failing_warm_up_is_logged_and_no_more(monkeypatch, caplog):
    def fail(is_over):
        raise OSError("no compiler")

    monkeypatch.setattr(maintenance, "warm_up", fail)
    trimmed = threading.Event()
    monkeypatch.setattr(maintenance, "TRIM_SECONDS", 0.01)
    monkeypatch.setattr(maintenance, "trimming", lambda: trimmed.set)
    thread = maintenance.MaintenanceThread(lambda: 10**6)
    assert trimmed.wait(60)
    thread.close()
    assert "could not be compiled ahead" in caplog.text


def test_a_small_model_compiles_nothing_and_an_unknown_one_is_waited_for(monkeypatch):
    monkeypatch.setattr(maintenance, "warm_up", lambda is_over: pytest.fail("compiled"))
    monkeypatch.setattr(maintenance, "trimming", lambda: None)
    monkeypatch.setattr(jit, "run_as_python", lambda: 1000)
    for size in (0, 100):
        thread = maintenance.MaintenanceThread(lambda size=size: size)
        thread.close()


def test_a_small_model_of_many_workers_is_compiled_once_loops_have_run_as_python_for_long(monkeypatch):
    compiled, looked = threading.Event(), threading.Event()

    @jit.compiled
    def loop(entries):
        return entries

    def size():
        looked.set()
        return 100

    before = jit.run_as_python()
    monkeypatch.setattr(maintenance, "_MANY_ENTRIES", before + 1000)
    monkeypatch.setattr(maintenance, "warm_up", lambda is_over: compiled.set())
    thread = maintenance.MaintenanceThread(size)
    assert looked.wait(60)
    assert not compiled.is_set()
    for _ in range(11):
        assert loop.on(100)(7) == 7
    assert jit.run_as_python() >= before + 1000
    assert compiled.wait(60)
    thread.close()


def test_a_c_library_without_trimming_is_no_reason_to_fail(monkeypatch):
    monkeypatch.setattr(maintenance.ctypes, "CDLL", lambda name: object())
    assert malloc.trimming() is None
    maintenance._keep_freed_memory()


def test_this_c_library_trims():
    trim = malloc.trimming()
    assert trim is None or trim() in (0, 1)


def test_a_server_that_is_stopped_compiles_no_further_part(monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def first():
        begun.set()
        assert go_on.wait(60)

    monkeypatch.setattr(warmup.warmup, "warm_up", first)
    for part in (warmup.union_loops, warmup.reply_loops):
        monkeypatch.setattr(part, "warm_up", lambda: pytest.fail("compiled"))
    monkeypatch.setattr(maintenance, "trimming", lambda: None)
    thread = maintenance.MaintenanceThread(lambda: 10**6)
    assert begun.wait(60)
    closing = threading.Thread(target=thread.close)
    closing.start()
    assert thread._stop.wait(60)
    go_on.set()
    closing.join(60)
    assert not closing.is_alive()
