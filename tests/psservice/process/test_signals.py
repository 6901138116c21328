"""Signals are heard while the main thread cannot hear them."""

import os
import subprocess
import sys

WAIT_SECONDS = 60

IN_A_CALL_THAT_LASTS = """
import os, queue, signal, sys, threading
from psservice.process.signals import SignalThread

heard = queue.SimpleQueue()
signals = SignalThread(heard.put)
os.kill(os.getpid(), signal.SIGHUP)
assert heard.get(timeout=60) is signal.SIGHUP
signals.hear = lambda number: os._exit(3 if number is signal.SIGTERM else 4)
threading.Thread(target=threading.Event().wait, daemon=True).start()  # the kernel gives it the signal instead
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
os.kill(os.getpid(), signal.SIGTERM)
os.open(sys.argv[1], os.O_RDONLY)
"""


def test_a_signal_is_heard_while_the_main_thread_opens_a_file_that_never_comes(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    program = [sys.executable, "-c", IN_A_CALL_THAT_LASTS, tmp_path / "pipe"]
    assert subprocess.run(program, timeout=WAIT_SECONDS, check=False).returncode == 3
