"""Starting, joining, stopping and resuming: real processes, whose ends are all seen."""

import argparse
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support import launch

import psclient
from tests.system.tools import wait_until

SCRIPT = Path(__file__).with_name("launched.py")
ROOT = Path(__file__).parents[2]
HANG_SECONDS = 600
"""Nothing here takes so long: a slow machine may take what it needs, and what hangs is ended all the same."""

pytestmark = pytest.mark.timeout(3 * HANG_SECONDS)


@contextmanager
def launched(out, mode, *options, **variables):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MODE": mode, "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, str(SCRIPT), "--out", str(out), *options]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    children = []
    try:
        yield process, children
    finally:
        for each in [*children, process]:
            try:
                each.kill()
            except psutil.NoSuchProcess:
                continue
        process.communicate(timeout=HANG_SECONDS)


def wait_for_steps(process, out, children, workers=2):
    """Wait until all workers have made steps, and remember every process of the run."""

    def stepped():
        assert process.poll() is None, process.communicate()[0]
        return all((out / f"version-{index}").exists() for index in range(workers))

    wait_until(stepped, HANG_SECONDS)
    children += psutil.Process(process.pid).children(recursive=True)


def all_gone(children):
    wait_until(lambda: not any(each.is_running() and each.status() != "zombie" for each in children), HANG_SECONDS)


def version(out):
    return max(int((out / f"version-{index}").read_text() or 0) for index in range(2))


def test_a_worker_that_fails_is_told_of_and_the_others_go_on(tmp_path):
    with launched(tmp_path / "run", "fail", "--workers", "2") as (process, _):
        output = process.communicate(timeout=HANG_SECONDS)[0]
    assert process.returncode == 1
    assert "worker-1: this worker cannot" in output
    assert "failed: worker-1 (status 1)" in output
    assert int((tmp_path / "run" / "version-0").read_text()) >= 5
    told = sorted(path.read_text().split()[1:] for path in (tmp_path / "run").glob("worker-*.fail"))
    assert told == [["0", "2"], ["1", "2"]]


def test_a_run_that_never_began_is_not_in_the_way_of_the_next(tmp_path):
    with launched(tmp_path / "run", "fail at once", "--workers", "1") as (process, _):
        output = process.communicate(timeout=HANG_SECONDS)[0]
    assert process.returncode == 1
    assert "failed: worker-0 (status 1), before the run had begun" in output
    assert not (tmp_path / "run" / "server").exists()


def test_a_server_that_does_not_answer_may_have_a_model(monkeypatch):
    """Its journal is kept; that of a server that says it has none is in the way of the next run."""
    with psclient.LocalServer() as server:
        assert not launch._has_model(server.server)
        process = psutil.Process(server.processes[0].pid)
        process.suspend()
        monkeypatch.setattr(launch, "ANSWER_SECONDS", 1.0)
        try:
            assert launch._has_model(server.server)
        finally:
            process.resume()


def test_a_failed_run_at_home_is_there_to_resume(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "worker-0.pt").write_text("what a run without a model on the server has kept")
    with launched(out, "fail at once", "--workers", "1") as (process, _):
        output = process.communicate(timeout=HANG_SECONDS)[0]
    assert "--resume goes on" in output
    assert (out / "server").exists()


def test_further_signals_do_not_disturb_the_end(tmp_path):
    out = tmp_path / "run"
    with launched(out, "for ever", "--workers", "2") as (process, children):
        wait_for_steps(process, out, children)

        def ended():
            process.send_signal(signal.SIGTERM)
            return process.poll() is not None

        wait_until(ended, HANG_SECONDS)
        output = process.communicate(timeout=HANG_SECONDS)[0]
        all_gone(children)
    assert process.returncode == 130, output
    assert "Traceback" not in output


def test_a_kill_leaves_nobody_behind_and_resume_goes_on_from_the_journal(tmp_path):
    out = tmp_path / "run"
    with launched(out, "for ever", "--workers", "2") as (process, children):
        wait_for_steps(process, out, children)
        process.kill()
        all_gone(children)
    reached = version(out)
    with launched(out, "steps", "--workers", "2") as (process, _):
        output = process.communicate(timeout=HANG_SECONDS)[0]
        assert process.returncode == 1
        assert "holds a run already: go on with it with --resume" in output
    with launched(out, "steps", "--workers", "2", "--resume") as (process, _):
        output = process.communicate(timeout=HANG_SECONDS)[0]
    assert process.returncode == 0, output
    assert version(out) >= reached


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_orderly(tmp_path, number):
    out = tmp_path / "run"
    with launched(out, "for ever", "--workers", "2") as (process, children):
        wait_for_steps(process, out, children)
        process.send_signal(number)
        output = process.communicate(timeout=HANG_SECONDS)[0]
        all_gone(children)
    assert process.returncode == 130, output
    assert "--resume goes on" in output


def test_a_server_that_dies_ends_the_run(tmp_path):
    out = tmp_path / "run"
    with launched(out, "for ever", "--workers", "2") as (process, children):
        wait_for_steps(process, out, children)
        server = next(each for each in children if "psservice" in " ".join(each.cmdline()))
        server.kill()
        output = process.communicate(timeout=HANG_SECONDS)[0]
        all_gone(children)
    assert process.returncode == 1
    assert "the server ended with status -9" in output


def test_a_process_of_a_job_takes_its_name_and_number_from_its_environment(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    with (
        psclient.LocalServer() as server,
        launched(out, "steps", "--server", server.server, JOB_COMPLETION_INDEX="3") as (process, _),
    ):
        output = process.communicate(timeout=HANG_SECONDS)[0]
    assert process.returncode == 0, output
    assert (out / "job-3.steps").read_text().split()[1] == "3"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("worker-0", 0, 1)),
        ({"PSCLIENT_WORKER": "anna"}, (None, 0, 1)),
        ({"JOB_COMPLETION_INDEX": "2"}, (None, 2, 3)),
        ({"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "8"}, (None, 2, 8)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (None, 0, 4)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (None, 5, 8)),
    ],
)
def test_where_a_process_stands_is_said_by_its_job(monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = argparse.Namespace(device="cpu", out=Path("out"), resume=False)
    place = launch._place_of_this_process(options, "host:1")
    assert (place.worker, place.index, place.workers) == expected
    assert place.is_first == (expected[1] == 0)


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        (("--workers", "0"), {}, "--workers must be at least 1"),
        ((), {"RANK": "0"}, "RANK says that this is one of several processes; start `psservice serve`"),
        (("--resume",), {}, "holds no run to resume"),
        (("--server", "nonsense"), {}, "'nonsense' is not HOST:PORT"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(tmp_path, options, variables, words):
    with launched(tmp_path / "run", "steps", *options, **variables) as (process, _):
        output = process.communicate(timeout=HANG_SECONDS)[0]
    assert process.returncode == 1
    assert words in output
    assert "Traceback" not in output
