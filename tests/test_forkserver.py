"""Processes that tests start are forked, and are processes like others: status, files, environment, children."""

import multiprocessing
import os
import signal
import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")

FORKED = "import sys; forked = 'psservice.process.server' in sys.modules; "


def run(code, **options):
    return subprocess.run([sys.executable, "-c", FORKED + code], capture_output=True, text=True, timeout=100, **options)


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "sys.exit('gone')", "raise ValueError('gone')", "sys.exit(None)"])
def test_the_status_is_that_of_an_interpreter(end):
    done = run(f"print(forked); {end}")
    assert done.stdout == "True\n"
    assert done.returncode == (3 if "3" in end else 1 if "gone" in end else 0)
    assert ("gone" in done.stderr) == ("gone" in end)


def test_what_is_registered_for_the_end_is_done_and_threads_are_awaited():
    done = run(
        "import atexit, threading, time\n"
        "atexit.register(print, 'the end')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('a thread'))).start()"
    )
    assert done.stdout == "a thread\nthe end\n"


def test_proc_shows_its_own_command_line_and_environment():
    command = [sys.executable, "-c", "print(input(), flush=True); input()", "named"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, env=os.environ | {"MARK": "here"}) as process:
        process.stdin.write(b"begun\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"begun\n"
        shown = psutil.Process(process.pid)
        assert shown.ppid() == os.getpid()
        assert "named" in shown.cmdline()
        assert shown.environ()["MARK"] == "here"
        process.communicate(b"\n")


def test_its_own_processes_are_forked_too_and_end_with_it():
    code = (
        "import os, subprocess; child = subprocess.Popen([sys.executable, '-c', "
        "\"import sys; print('psservice.process.server' in sys.modules, flush=True); sys.stdin.read()\"], "
        "stdin=subprocess.PIPE); print(child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", FORKED + code], stdout=subprocess.PIPE, text=True) as process:
        lines = {process.stdout.readline().strip() for _ in range(2)}
        assert "True" in lines
        (child,) = map(int, lines - {"True"})
        below = psutil.Process(process.pid).children(recursive=True)
        assert child in {each.pid for each in below}
        process.send_signal(signal.SIGKILL)
        assert psutil.wait_procs(below, timeout=60)[1] == []


def test_multiprocessing_forks_too_where_it_spawns():
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert pool.apply(os.getppid) == os.getpid()
        assert "psservice.process.server" in pool.apply(loaded)


def loaded():
    return list(sys.modules)


@pytest.mark.executes_python
def test_tests_of_the_start_run_a_new_interpreter():
    assert run("print(forked)").stdout == "False\n"
