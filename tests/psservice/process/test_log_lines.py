"""Every line of the JSON log is JSON: what Python or gRPC would write to stderr by itself too."""

import json
import logging
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.system.tools import wait_until

ROOT = Path(__file__).parents[3]
STRAY = """
import sys, threading, warnings
from psservice.observability import log_lines
log_lines.configure("info", "json")
warnings.warn("a warning")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start(); thread.join()
class Broken:
    def __del__(self): raise ValueError("in a finalizer")
Broken()
raise RuntimeError("the end")
"""


@pytest.mark.executes_python
def test_warnings_and_errors_that_nobody_catches_are_lines_of_the_log():
    done = subprocess.run([sys.executable, "-c", STRAY], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 1
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    told = [line["message"] + line.get("exc_info", "") for line in lines]
    for word, text in zip(("a warning", "ZeroDivisionError", "in a finalizer", "the end"), told, strict=True):
        assert word in text


@pytest.mark.long
@pytest.mark.executes_python
def test_grpc_writes_no_line_of_its_own():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = (f"--listen=127.0.0.1:{taken.getsockname()[1]}", "--health-listen=", "--metrics-listen=")
        command = [sys.executable, "-m", "psservice", "serve", *flags, "--log-format=json"]
        done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 1
    *lines, last = done.stderr.splitlines()
    assert last.startswith("psservice serve: cannot listen")
    for line in lines:
        json.loads(line)


def test_lines_that_are_dropped_while_a_disk_hangs_are_counted(monkeypatch):
    from psservice.observability import log_lines

    monkeypatch.setattr(log_lines, "_MOST_LINES", 5)
    hangs, written = threading.Event(), []

    class Disk(logging.Handler):
        def emit(self, record):
            assert hangs.wait(60)
            written.append((record.levelname, record.getMessage(), getattr(record, "lines", None)))

    logger = logging.getLogger("test_log_lines")
    logger.propagate = False
    logger.addHandler(thread := log_lines._LineThread(Disk()))
    try:
        for number in range(20):
            logger.error("line %d", number)
    finally:
        logger.removeHandler(thread)
        hangs.set()
    wait_until(lambda: written and written[-1][2])
    *lines, (level, what, count) = written
    assert [text for _, text, _ in lines] == [f"line {number}" for number in range(len(lines))]
    assert 5 <= len(lines) <= 6  # one may be with the disk already
    assert (level, count) == ("ERROR", 20 - len(lines))
    assert "lost" in what
    thread.close()
