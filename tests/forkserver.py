"""Python processes of tests begin as forks of a process that has already loaded PyTorch and both packages.

Importing them would be half of the CPU time of tests with processes. The forks are processes all the same: they have
their own environment, files and session, and are children of the process that started them, which signals, kills and
awaits them as ever. Tests of the start itself have the marker ``executes_python`` and run a new interpreter.

``python -m tests.forkserver FD`` reads requests from the socket ``FD``, forks twice for each, so that the new process
is orphaned at once, and answers with its id. The asking process is a subreaper (``prctl(2)``) meanwhile, and so becomes
the parent of the new process.
"""

import atexit
import contextlib
import ctypes
import encodings.idna  # noqa: F401  # which a server's first socket loads
import gc
import json
import multiprocessing.util
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

_ROOT = Path(__file__).parents[1]
_SET_CHILD_SUBREAPER = 36
_MESSAGE_BYTES = 1 << 20
_MOST_DESCRIPTORS = 16
_MOST_SHOWN = 4000
"""Bytes of a new process's command line, and of its environment, that ``/proc`` shows."""
_ANSWER_SECONDS = 100.0  # the first one comes when everything is loaded
_MOST_WORKERS = 20  # of pytest-xdist, each with ports of its own
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # libraries that start threads when loaded
_AT_START = ("PYTHON", "NUMBA_", "TORCH", "TRITON_", "CUDA_")
"""Variables that count when an interpreter or a module starts."""
_LATER = ("PYTHONPATH", "TORCHELASTIC_", "TORCH_NCCL_")
"""Variables of these names that do not."""

_Execute, _spawn = subprocess.Popen, multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]


class ForkServer:
    """Started with the first process; ends with the process that asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._owner = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this process may ask; a fork of it may not, since new processes would not be its children."""
        return os.getpid() == self._owner

    def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Start a process; return its id."""
        with self._lock:
            asked = self._socket or self._start()
            _subreaper(True)
            try:
                socket.send_fds(asked, [json.dumps(request).encode()], descriptors)
                pid = int(asked.recv(_MESSAGE_BYTES) or b"0")
            except BaseException:
                self._socket = None  # the answer to this may still come, and would be taken for the next one's
                raise
            finally:
                _subreaper(False)
        if not pid:
            raise RuntimeError("the fork server is gone; its message is above")
        return pid

    def of(self, serving: socket.socket) -> None:
        """Ask through a socket behind which a fork server is."""
        self._socket, self._owner = serving, os.getpid()

    def start(self) -> None:
        """Begin before the first request, which else waits for seconds."""
        with self._lock:
            self._socket = self._socket or self._start()

    def _start(self) -> socket.socket:
        self._socket, other = _pair()
        with other:
            _Execute(
                [sys.executable, "-m", "tests.forkserver", str(other.fileno()), " " * _MOST_SHOWN],
                pass_fds=(other.fileno(),),
                stdin=subprocess.DEVNULL,
                env=os.environ | dict.fromkeys(_THREADS, "1") | {"ROOM": " " * _MOST_SHOWN},
                cwd=_ROOT,
                start_new_session=True,
            )
        return self._socket


_server = ForkServer()


class Popen(_Execute):  # type: ignore[type-arg]
    """Stands in for :class:`subprocess.Popen`: ``python`` with ``-c``, ``-m`` or a file is forked, all else run."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
                       env: Any, startupinfo: Any, creationflags: Any, shell: Any, *rest: Any) -> None:  # fmt: skip
        pipes, start_new_session = rest[:6], rest[-2]  # reading and writing ends of stdin, stdout, stderr; -1 for none
        words = [os.fspath(word) for word in args] if isinstance(args, list | tuple) else []
        environment = dict(os.environ if env is None else env)
        is_unbuffered = words[1:2] == ["-u"]  # torchrun's
        if is_unbuffered:
            del words[1]
        is_safe = words[1:2] == ["-P"]
        if is_safe:
            del words[1]
        if shell or preexec_fn or not _server.is_here or not _is_forkable(words, environment):
            before = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell)
            super()._execute_child(*before, *rest)  # type: ignore[misc]
            return
        standard = (pipes[0], pipes[3], pipes[5])
        request = {
            "words": words[1:],
            "safe": is_safe,
            "environment": environment | ({"PYTHONUNBUFFERED": "1"} if is_unbuffered else {}),
            "directory": os.fspath(cwd) if cwd else os.getcwd(),
            "numbers": [0, 1, 2, *pass_fds],
            "session": bool(start_new_session),
        }
        try:
            inherited = [usual if number == -1 else number for usual, number in enumerate(standard)]
            self.pid = _server.fork(request, [*inherited, *pass_fds])
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def spawn(path: Any, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
    """Stands in for ``multiprocessing.util.spawnv_passfds``: the new process is forked."""
    words = [os.fsdecode(word) for word in arguments]
    if not _server.is_here or "--multiprocessing-fork" not in words:  # its own fork server, and its tracker
        return _spawn(path, arguments, descriptors)
    request = {
        "words": words[words.index("-c") :],  # flags stand before it
        "safe": False,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "numbers": [0, 1, 2, *descriptors],
        "session": False,
    }
    return _server.fork(request, [0, 1, 2, *descriptors])


def fork_from_here(replace: Callable[[object, str, Any], None]) -> None:
    """Have processes that this one starts be forked; ``replace`` is :func:`setattr`, or one that can be undone."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        _server.start()
    replace(subprocess, "Popen", Popen)
    replace(multiprocessing.util, "spawnv_passfds", spawn)


def _is_forkable(words: Sequence[str], environment: dict[str, str]) -> bool:
    def differs(name: str) -> bool:
        matters = name.startswith(_AT_START) and not name.startswith(_LATER)
        return matters and environment.get(name) != os.environ.get(name)

    is_python = len(words) > 1 and words[0] == sys.executable and (words[1] in ("-c", "-m") or words[1].endswith(".py"))
    return is_python and not any(differs(name) for name in environment.keys() | os.environ.keys())


def _pair() -> tuple[socket.socket, socket.socket]:
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.settimeout(_ANSWER_SECONDS)
    return mine, other


def _subreaper(on: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _serve(listening: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each request; return the request in the process, and ``None`` here after the last."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(listening, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
        if not data:
            return None
        read_end, write_end = os.pipe()
        between = os.fork()
        if between == 0:
            first_parent = os.getpid()
            if os.fork() == 0:
                break
            os._exit(0)
        os.waitpid(between, 0)
        os.close(write_end)
        listening.send(os.read(read_end, _MESSAGE_BYTES))
        for descriptor in (*descriptors, read_end):
            os.close(descriptor)
    request: dict[str, Any] = json.loads(data)
    if request["session"]:
        os.setsid()
    while os.getppid() == first_parent:  # a server ends when its parent is not the one that it was told
        time.sleep(0.001)
    os.write(write_end, str(os.getpid()).encode())  # no earlier: who asks may signal the process's group at once
    for descriptor in (read_end, write_end, listening.detach()):
        os.close(descriptor)
    _place(descriptors, request["numbers"])
    if request["words"][:2] != ["-m", "psservice"]:  # which starts no other
        _fork_here_too(request["numbers"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _show([sys.executable, *request["words"]], request["environment"])
    os.chdir(request["directory"])
    return request


def _fork_here_too(numbers: Sequence[int]) -> None:
    """Leave a fork server behind, as a child, while nothing has been started here; it ends with this process."""
    mine, other = _pair()
    if os.fork() == 0:
        mine.close()
        os.setsid()  # no signal of the new process's group, and none of its files, is for it
        null = os.open(os.devnull, os.O_RDWR)
        for number in numbers:
            os.dup2(null, number)
        os.close(null)
        _answer(other)
    other.close()
    _server.of(mine)
    fork_from_here(setattr)


def _show(words: Sequence[str], environment: dict[str, str]) -> None:
    """Let ``/proc`` show the new process's command line and environment, where it shows those of the fork server."""
    places = list(map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]))
    lines = [f"{name}={value}" for name, value in environment.items()]
    for begin, end, shown in ((*places[:2], words), (*places[2:], lines)):
        data = b"\0".join(map(os.fsencode, shown))[: end - begin - 1]
        ctypes.memmove(begin, data.ljust(end - begin, b"\0"), end - begin)


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give each descriptor its number in the new process."""
    above = max(*descriptors, *numbers) + 1
    for descriptor, place in zip(descriptors, range(above, above + len(descriptors)), strict=True):
        os.dup2(descriptor, place)
        os.close(descriptor)
    for place, number in zip(range(above, above + len(descriptors)), numbers, strict=True):
        os.dup2(place, number, inheritable=True)
        os.close(place)


def _open_standard_streams() -> None:
    """Open the new process's own, as an interpreter does; those of the fork server know another file."""
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        by_line = number == 2 or os.isatty(number)
        stream = open(number, "w", 1 if by_line else -1, errors=errors, closefd=False)  # noqa: SIM115
        stream.reconfigure(write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(words: Sequence[str], *, safe: bool) -> None:
    """Do what ``python -c``, ``python -m`` and ``python FILE`` do; ``safe`` as with ``-P``."""
    for path in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if path:
            sys.path.insert(0, path)
    if words[0] == "-m":
        if not safe:
            sys.path.insert(0, os.getcwd())
        sys.argv = ["-m", *words[2:]]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *words[2:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.path.insert(0, str(Path(words[0]).parent))
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")


def _end(status: int) -> NoReturn:
    """End as an interpreter does, but free no object: that would copy every page that the fork server has filled."""
    threading._shutdown()  # type: ignore[attr-defined]  # awaits threads that are no daemons
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):  # nobody reads; the interpreter's own end tells of it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _answer(listening: socket.socket) -> NoReturn:
    """Fork a process for each request, and end with the last; be, in each, what it asks for, to its end."""
    request = _serve(listening)
    if request is None:
        os._exit(0)
    _open_standard_streams()
    status: object = 0
    try:
        _run(request["words"], safe=request["safe"])
    except SystemExit as ended:
        status = ended.code
    if not isinstance(status, int | None):
        sys.exit(status)
    _end(status or 0)


def use_own_ports() -> None:
    """Let servers whose port nobody names share their ports with no other of pytest's processes.

    Or one could get the port of a server that is being started again.
    """
    from psservice.rpc import ports

    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _MOST_WORKERS
    share = len(ports._UNNAMED_PORTS) // _MOST_WORKERS
    ports._UNNAMED_PORTS = ports._UNNAMED_PORTS[worker * share : (worker + 1) * share]


def main() -> None:
    """Load what a server and a worker load, and fork."""
    sys.modules["triton"] = None  # type: ignore[assignment]  # it would report leaks at the end of each process
    import torch._dynamo  # noqa: F401  # which torch.optim loads at the first step

    del sys.modules["triton"]
    import psclient.cli
    import psclient.optim.base  # noqa: F401
    import psservice.cli.main
    import psservice.cli.serve
    import psservice.observability.log_lines
    import psservice.process.server
    import psservice.process.shard_processes
    import psservice.process.standby_server
    import psservice.relay.shard_count  # noqa: F401
    from pscore.warmup import warm_up
    from psservice.settings import load

    warm_up()  # loads numba, which a server does with its first large push
    load([])  # pydantic keeps what it has looked up
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # torch's, of its own tables
        finalizer.atexit = False
    gc.collect()
    gc.freeze()
    use_own_ports()
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("a fork would lose the threads that an import has started")
    _answer(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
