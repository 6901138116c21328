"""Running the examples as a user does: in processes of their own, which must leave none behind."""

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import psutil

from tests.system.tools import wait_until

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def marked(**variables):
    """Return an environment whose processes can be told from all others, and its mark."""
    mark = uuid.uuid4().hex
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return os.environ | threads | {"PYTHONPATH": path, "EXAMPLE_MARK": mark} | variables, mark


def assert_none_left(mark):
    """No process has the mark."""

    def left():
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("EXAMPLE_MARK") == mark:
                    found.append(process.pid)
            except psutil.Error:  # another user's, or gone by now
                continue
        return found

    wait_until(lambda: not left(), 10)


def run_example(script, *arguments, status=0, **variables):
    """Run a script to its end; return what it has printed, errors included."""
    environment, mark = marked(**variables)
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100
    )
    assert done.returncode == status, done.stdout
    assert_none_left(mark)
    return done.stdout


def accuracies(output):
    """Return the test accuracies that were printed."""
    return [float(found) / 100 for found in re.findall(r"accuracy ([\d.]+)\s?%", output)]
