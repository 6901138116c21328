"""Servers of tests begin as forks of a process that has already loaded everything.

More than half of the CPU time of tests with servers used to be servers, most of it the import of torch.
They are processes all the same, with an environment, files and a session of their own, and children of the process that
tests: they are signalled, killed and waited for as ever. Tests of the start itself run ``python -m psservice``.

``python -m tests.forkserver FD`` reads requests from the socket ``FD``, forks twice for each so that the server is
orphaned at once, and answers with its process id. Whoever asks is a subreaper (``prctl(2)``) meanwhile, and so becomes
its parent.
"""

import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

_ROOT = Path(__file__).parents[1]
_SET_CHILD_SUBREAPER = 36
_MESSAGE_BYTES = 1 << 20
_ANSWER_SECONDS = 60.0
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # libraries that start threads when loaded


class ForkServer:
    """Started at the first server; ends with the process that asks."""

    def __init__(self) -> None:
        """Do nothing yet."""
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def spawn(self, flags: Sequence[str], ready_fd: int, log_to: IO[str] | None) -> "subprocess.Popen[bytes]":
        """Stand in for :func:`psclient.rpc.local_server.spawn`."""
        request = {
            "arguments": ["serve", *(flag for flag in flags if not flag.startswith("--ready-fd="))],
            "environment": dict(os.environ),
            "directory": os.getcwd(),
        }
        with self._lock:
            asked = self._socket or self._start()
            _subreaper(True)
            try:
                stderr = 2 if log_to is None else log_to.fileno()
                socket.send_fds(asked, [json.dumps(request).encode()], [ready_fd, 1, stderr])
                pid = int(asked.recv(_MESSAGE_BYTES) or b"0")
            except BaseException:
                self._socket = None  # the answer to this may still come, and would be taken for the next one's
                raise
            finally:
                _subreaper(False)
        if not pid:
            raise RuntimeError("the fork server is gone; its message is above")
        return _Forked(pid, flags)

    def _start(self) -> socket.socket:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_ANSWER_SECONDS)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forkserver", str(other.fileno())],
                pass_fds=(other.fileno(),),
                stdin=subprocess.DEVNULL,
                env=os.environ | dict.fromkeys(_THREADS, "1"),
                cwd=_ROOT,
                start_new_session=True,
            )
        return self._socket


class _Forked(subprocess.Popen[bytes]):
    """A child that this class did not start."""

    def __init__(self, pid: int, flags: Sequence[str]) -> None:
        self.args = ["psservice", "serve", *flags]
        self.pid = pid
        self.returncode = None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()
        self._sigint_wait_secs = 0.25


def _subreaper(on: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _fork(listening: socket.socket) -> list[str]:
    """Fork a server for each request; return its arguments in the server, and never here.

    Raises:
        ValueError: who asks is gone, so no descriptors come.
    """
    while True:
        data, (ready_fd, stdout, stderr), _, _ = socket.recv_fds(listening, _MESSAGE_BYTES, 3)
        read_end, write_end = os.pipe()
        between = os.fork()
        if between == 0:
            first_parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                break
            os.write(write_end, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)
        listening.send(os.read(read_end, _MESSAGE_BYTES))  # no earlier: the server has its new parent by now
        for descriptor in (ready_fd, stdout, stderr, read_end, write_end):
            os.close(descriptor)

    os.setsid()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for descriptor in (stdout, stderr, read_end, write_end, listening.detach()):
        os.close(descriptor)
    request = json.loads(data)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    while os.getppid() == first_parent:  # a server ends when its parent is not the one that it was told
        time.sleep(0.001)
    return [*request["arguments"], f"--ready-fd={ready_fd}"]


def main() -> int:
    """Load what a server loads, and fork."""
    import psservice.app.server  # noqa: F401
    from psservice.cli.serve import main as psservice_main

    gc.collect()
    gc.freeze()
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("a fork would lose the threads that an import has started")
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        try:
            arguments = _fork(listening)
        except ValueError:
            return 0
    return psservice_main(arguments)


if __name__ == "__main__":
    sys.exit(main())
