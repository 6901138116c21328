"""The loops of ``examples/loops``, all in one way: alone, with two workers that are broken off, on a fresh server."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import torch

import psclient

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "loops"
POLL_SECONDS = 0.02
SLOWEST_SECONDS = 600.0
"""Of one process: it then hangs. A busy machine may take several times what a quiet one does."""
ENDLESS = ("--epochs", "100000")
INTERRUPTED = (-signal.SIGINT, 1, 128 + signal.SIGINT)
"""Statuses of a process after Ctrl-C: Python's own, Lightning's, and a shell's."""


class ExampleFailedError(Exception):
    """An example did not do what it should; the message says what."""


@dataclass(frozen=True)
class Loop:
    """One script, or one form of it.

    Attributes:
        name: of its folder.
        command: the script, and the options that make the form.
        saved: what is in its ``--out`` when a first checkpoint is whole, as a glob.
        needs: packages that it imports.
        short: whether it is only broken off; another entry runs the script alone and on a fresh server.
    """

    name: str
    command: tuple[str, ...]
    saved: str
    needs: tuple[str, ...] = ()
    short: bool = False

    @property
    def missing(self) -> list[str]:
        """Packages that are not installed here."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


LOOPS = (
    Loop("hf_trainer", ("hf_trainer.py",), "checkpoint-*/trainer_state.json", ("transformers", "accelerate")),
    Loop(
        "hf_trainer_lora",
        ("hf_trainer.py", "--lora"),
        "checkpoint-*/trainer_state.json",
        ("transformers", "accelerate", "peft"),
        short=True,
    ),
    Loop("lightning", ("lightning_loop.py",), "last.ckpt", ("lightning",)),
    Loop("lightning_manual", ("lightning_loop.py", "--manual"), "last.ckpt", ("lightning",), short=True),
    Loop("accelerate", ("accelerate_loop.py",), "state/random_states_0.pkl", ("accelerate",)),
    Loop("timm", ("timm_loop.py",), "timm.pt", ("timm",)),
    Loop("nanogpt", ("nanogpt.py",), "ckpt.pt"),
    Loop("gan", ("gan.py",), "gan.pt"),
)


def run(loop: Loop, folder: Path) -> None:
    """Run a loop in all ways; the folder must be new.

    Raises:
        ExampleFailedError: it failed in one of them.
    """
    for way in ways(loop):
        way(loop, folder / way.__name__)


def ways(loop: Loop) -> list[Callable[[Loop, Path], None]]:
    return [broken_off] if loop.short else [alone, broken_off, fresh]


def alone(loop: Loop, folder: Path) -> None:
    """The script is an ordinary one where no server is named."""
    with processes() as start:
        _end(start(loop, folder, "--epochs", "1"))
    if not (folder / "model.pt").exists():
        raise ExampleFailedError(f"no model was saved; see {folder / 'log'}")


def broken_off(loop: Loop, folder: Path) -> None:
    """Of two workers one is killed and one interrupted; both go on at the same server, and end with its run."""
    with psclient.LocalServer(lease_seconds=5) as server, processes() as start:
        workers = [
            (loop, folder / f"worker-{i}", *ENDLESS, "--seed", str(i), "--server", server.server) for i in (0, 1)
        ]
        interrupted, killed = (start(*each) for each in workers)
        for each in (interrupted, killed):
            each.wait_for(lambda each=each: any(each.folder.glob(loop.saved)), "saved nothing")
        killed.process.kill()
        interrupted.process.send_signal(signal.SIGINT)
        _end(interrupted, INTERRUPTED)
        killed.process.wait()

        resumed = [start(*each, "--resume") for each in workers]
        for each in resumed:
            before = _checkpoints(loop, each.folder)
            each.wait_for(
                lambda each=each, before=before: _checkpoints(loop, each.folder) != before, "saved nothing when resumed"
            )
        subprocess.run([sys.executable, "-m", "psservice", "finish", server.server], check=True, cwd=ROOT, timeout=120)
        for each in resumed:
            _end(each)
        for each in resumed:
            require_same(server.server, each.folder)


def fresh(loop: Loop, folder: Path) -> None:
    """A server that is gone with its model is replaced by a new one, which begins with the checkpoint's."""
    options = (loop, folder, "--epochs", "1", "--server")
    with processes() as start:
        with psclient.LocalServer() as server:
            _end(start(*options, server.server))
            require_same(server.server, folder)
        trained = torch.load(folder / "model.pt")
        with psclient.LocalServer() as server:
            _end(start(*options, server.server, "--resume"))  # nothing is left to train
            require_same(server.server, folder)
    again = torch.load(folder / "model.pt")
    different = [name for name in trained if not torch.equal(trained[name], again[name])]
    if different:
        raise ExampleFailedError(f"{different[0]} is not the checkpoint's on a fresh server; see {folder / 'log'}")


@dataclass
class Running:
    """A script that was started.

    Attributes:
        process: it.
        folder: its ``--out``, with its log.
    """

    process: "subprocess.Popen[bytes]"
    folder: Path

    def wait_for(self, condition: Callable[[], bool], failure: str) -> None:
        """Wait while it runs; raises ``ExampleFailedError`` with what it has not done."""
        deadline = time.monotonic() + SLOWEST_SECONDS
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise ExampleFailedError(f"{failure}, status {self.process.returncode}; see {self.folder / 'log'}")
            time.sleep(POLL_SECONDS)


@contextmanager
def processes() -> "Iterator[Callable[..., Running]]":
    """Give what starts a loop with options; what still runs in the end is killed."""
    with ExitStack() as stack:

        def begin(loop: Loop, folder: Path, *options: str) -> Running:
            folder.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context((folder / "log").open("a"))
            command = [str(FOLDER / loop.command[0]), *loop.command[1:], *options, "--out", str(folder)]
            process = start(command, log, PSCLIENT_WORKER=folder.name)
            stack.callback(kill_with_children, process)
            return Running(process, folder)

        yield begin


def environment() -> dict[str, str]:
    """Return what a script is to have in its environment: these packages, and output that is not kept back."""
    return os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def start(command: Sequence[str], log: IO[Any], **variables: str) -> "subprocess.Popen[bytes]":
    """Start a script beside its log; a user may stand anywhere."""
    return subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment() | variables,
        cwd=Path(log.name).parent,
    )


def kill_with_children(process: "subprocess.Popen[bytes]") -> None:
    """Kill a run at one blow, as a power cut does: the script, its server and its workers."""
    try:
        everything = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        everything = []
    for each in everything:
        with suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGKILL)
    process.wait()
    psutil.wait_procs(everything, timeout=30.0)


def _end(running: Running, statuses: Sequence[int] = (0,)) -> None:
    try:
        status = running.process.wait(SLOWEST_SECONDS)
    except subprocess.TimeoutExpired:
        status = None
    if status not in statuses:
        raise ExampleFailedError(f"ended with status {status} (None: it hangs); see {running.folder / 'log'}")


def _checkpoints(loop: Loop, folder: Path) -> dict[Path, int]:
    found = {}
    for path in folder.glob(loop.saved):
        with suppress(FileNotFoundError):
            found[path] = path.stat().st_mtime_ns
    return found


def require_same(server: str, folder: Path) -> None:
    """What a script has tested in the end, and saved, is the server's model."""
    served, tested = psclient.download(server), torch.load(folder / "model.pt")
    averaged = ("running_mean", "running_var", "num_batches_tracked")  # BatchNorm's are exchanged every so many steps
    parameters = [name for name in served if not name.endswith(averaged)]
    different = [name for name in parameters if not torch.equal(served[name], tested[name])]
    if different or not parameters:
        raise ExampleFailedError(f"{different} of the server are not what was tested; see {folder / 'log'}")
