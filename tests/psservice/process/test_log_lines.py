"""Every line of the JSON log is JSON: what Python or gRPC would write to stderr by itself too."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

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
