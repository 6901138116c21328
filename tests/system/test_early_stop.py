"""A server that is told to stop while it is still starting does so at once, as the first process of a container too."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.system.tools import wait_until


def catches(process: subprocess.Popen[bytes], number: int) -> bool:
    """Tell whether a process has a handler for a signal: without one, the kernel keeps it from a container's first."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) & 1 << (number - 1))


def test_sigterm_while_starting_is_heeded(tmp_path):
    tokens = tmp_path / "tokens"
    os.mkfifo(tokens)  # nobody writes to it: the start goes no further than reading it
    ports = [f"--{name}=127.0.0.1:0" for name in ("listen", "health-listen", "metrics-listen")]
    with subprocess.Popen([sys.executable, "-m", "psservice", "serve", *ports, f"--tokens={tokens}"]) as process:
        try:
            wait_until(lambda: catches(process, signal.SIGTERM), 60.0)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
