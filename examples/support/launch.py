"""One script, three ways to run it: alone with worker processes of its own, joining a server, or as one of many.

``--workers N`` starts a server and N workers on this machine. ``--server HOST:PORT`` joins a server that runs already;
with ``--workers N`` as N processes, without it as one: so under ``torchrun``, in a Slurm array, and in a Kubernetes
indexed Job, where each process takes its name from its environment.
"""

import argparse
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch

import psclient

STOP_SECONDS = 30.0
ANSWER_SECONDS = 30.0
POLL_SECONDS = 0.5
INDEX_VARIABLES = ("RANK", "JOB_COMPLETION_INDEX", "SLURM_PROCID")
"""Where torchrun, Kubernetes and Slurm tell a process its number."""


@dataclass(frozen=True)
class Place:
    """Where one worker stands.

    Attributes:
        server: the addresses of the shards.
        worker: its name; ``None`` takes it from the job's environment.
        index: its number; worker 0 reports, evaluates and saves.
        workers: how many there are, as far as is known.
        device: that it trains on.
        out: the run's folder.
        resume: whether the run goes on from there.
    """

    server: str
    worker: str | None
    index: int
    workers: int
    device: torch.device
    out: Path
    resume: bool

    @property
    def is_first(self) -> bool:
        """Whether this is worker 0."""
        return self.index == 0


Train = Callable[[argparse.Namespace, Place], None]


def at_least(least: int) -> Callable[[str], int]:
    """Return what ``add_argument`` takes as the type of a whole number that is not smaller."""

    def parse(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {number}")
        return number

    parse.__name__ = "int"  # argparse: invalid int value
    return parse


def add_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    """Add the options that :func:`run` reads; ``out`` is the default folder."""
    group = parser.add_argument_group("where it runs")
    group.add_argument("--workers", type=int, metavar="N", help="worker processes on this machine (default: 1)")
    group.add_argument("--server", metavar="HOST:PORT", help="join this server (each shard in order, with commas)")
    group.add_argument(
        "--device",
        default="auto",
        metavar="NAME",
        help="of workers, and of a server started here: auto, cpu, cuda or cuda:N (default: auto)",
    )
    group.add_argument("--out", type=Path, default=Path(out), metavar="DIR", help="default: %(default)s")
    group.add_argument("--resume", action="store_true", help="go on with the run in --out, after a crash or Ctrl-C")


def run(train: Train, options: argparse.Namespace) -> int:
    """Train as the options say; return the exit status. Call this under ``if __name__ == "__main__":``."""
    return guarded(lambda: _run(train, options), f"the same command with --resume goes on with {options.out}")


def guarded(work: Callable[[], int], after_interrupt: str = "nothing is kept") -> int:
    """Do a script's work; return its exit status. An error with a next step, and Ctrl-C, are a line on stderr."""
    try:
        return work()
    except KeyboardInterrupt:
        print(f"interrupted; {after_interrupt}", file=sys.stderr)
        return 130
    except (psclient.errors.SparsepsError, OSError, ValueError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 1


def _run(train: Train, options: argparse.Namespace) -> int:
    """Be the one worker that this process is, or start a server and workers."""
    server = options.server or os.environ.get("PSCLIENT_SERVER")
    if options.workers is not None and options.workers < 1:
        raise psclient.errors.ConfigurationError("--workers must be at least 1")
    if server and options.workers is None:
        train(options, _place_of_this_process(options, server))
        return 0
    variable = next((name for name in INDEX_VARIABLES if os.environ.get(name)), None)
    if variable and not server:
        raise psclient.errors.ConfigurationError(
            f"{variable} says that this is one of several processes; start `psservice serve` and pass --server"
        )
    return _launch(train, options, server)


def _place_of_this_process(options: argparse.Namespace, server: str) -> Place:
    """Return the place of a process that somebody else has started, one of several perhaps."""

    def number(*names: str, default: int) -> int:
        return next((int(os.environ[name]) for name in names if os.environ.get(name)), default)

    index = number(*INDEX_VARIABLES, default=0)
    named = any(os.environ.get(name) for name in (*INDEX_VARIABLES, "PSCLIENT_WORKER"))
    return Place(
        server,
        None if named else "worker-0",
        index,
        max(index + 1, number("WORLD_SIZE", "SLURM_NTASKS", default=1)),
        find_device(options.device, number("LOCAL_RANK", "SLURM_LOCALID", default=0)),
        options.out,
        options.resume,
    )


def _launch(train: Train, options: argparse.Namespace, server: str | None) -> int:
    """Start a server, unless there is one, and the workers; wait for them."""
    workers = options.workers or 1
    with ExitStack() as stack:
        local = None
        if server is None:
            _prepare(options.out, resume=options.resume)
            log = stack.enter_context((options.out / "server.log").open("a"))
            local = stack.enter_context(
                psclient.LocalServer(log_to=log, data_dir=options.out / "server", device=options.device)
            )
            print(f"server at {local.server}; its journal and log are in {options.out}", flush=True)
        context = multiprocessing.get_context("spawn")
        places = [
            Place(
                server or local.server,  # type: ignore[union-attr]
                f"worker-{index}",
                index,
                workers,
                find_device(options.device, index),
                options.out,
                options.resume,
            )
            for index in range(workers)
        ]
        # Not daemonic: the processes of a DataLoader are theirs.
        processes = [
            context.Process(target=_work, args=(train, options, place), name=place.worker, daemon=False)
            for place in places
        ]
        with _stopped_in_the_end(processes):
            _await(processes, local)
        failed = [f"{process.name} (status {process.exitcode})" for process in processes if process.exitcode]
        begun = not failed or options.resume or any(options.out.glob("worker-*.pt"))
        begun = begun or _has_model(server or local.server)  # type: ignore[union-attr]
    if failed:
        advice = (
            "; when that is mended, the same command with --resume goes on" if begun else ", before the run had begun"
        )
        print(f"failed: {', '.join(failed)}{advice}", file=sys.stderr)
    if local is not None and not begun:
        shutil.rmtree(options.out / "server")
    return 1 if failed else 0


def _has_model(server: str) -> bool:
    """Tell whether a worker has brought the server its model; one that does not answer may well have one."""
    try:
        psclient.download(server, patience_seconds=ANSWER_SECONDS)
    except psclient.errors.ServerNotReadyError:
        return False
    except psclient.errors.SparsepsError:
        pass
    return True


def _prepare(out: Path, *, resume: bool) -> None:
    """Make the folder of a run; raises ``ValueError`` where a run would be overwritten, or is not there to resume."""
    began = (out / "server").exists()
    if began and not resume:
        raise ValueError(f"{out} holds a run already: go on with it with --resume, or choose another --out")
    if resume and not began:
        raise ValueError(f"{out} holds no run to resume: leave --resume out, or choose its --out")
    out.mkdir(parents=True, exist_ok=True)


def find_device(name: str, index: int = 0) -> torch.device:
    """Return the device of the worker of this number: with ``cuda``, one GPU after the other."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{index % max(1, torch.cuda.device_count())}"
    return torch.device(name)


def _await(processes: Sequence[BaseProcess], server: psclient.LocalServer | None) -> None:
    """Wait for the workers; raises where their server has ended before them."""
    running = {process.sentinel for process in processes}
    while running:
        running -= {sentinel for sentinel in wait(list(running), POLL_SECONDS) if isinstance(sentinel, int)}
        status = server.processes[0].poll() if server and running else None
        if status is not None:
            for process in processes:  # they would wait for a server to hand in what they hold
                process.kill()
            raise psclient.errors.ConfigurationError(f"the server ended with status {status}; see its log")


@contextmanager
def _stopped_in_the_end(processes: Sequence[BaseProcess]) -> Iterator[None]:
    """Start the workers; SIGTERM to this process is as Ctrl-C, and none of them outlives the block."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is for this process to handle
    terminated = signal.signal(signal.SIGTERM, _interrupt)
    try:
        for process in processes:
            process.start()
        signal.signal(signal.SIGINT, _interrupt)
        yield
    finally:
        _ignore_signals()
        deadline = time.monotonic() + STOP_SECONDS
        started = [process for process in processes if process.pid is not None]
        for process in started:
            process.terminate()  # psclient pushes what the worker still holds, and leaves
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
    signal.signal(signal.SIGINT, before)  # not after an interruption: what follows is the end
    signal.signal(signal.SIGTERM, terminated)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    _ignore_signals()  # a second one would break off the stopping
    raise KeyboardInterrupt


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _work(train: Train, options: argparse.Namespace, place: Place) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if place.device.type == "cpu":  # the workers share the cores
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.workers))
    try:
        train(options, place)
    except (psclient.errors.SparsepsError, OSError, ValueError) as error:
        print(f"{place.worker}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


def _end_with_parent() -> None:
    """Leave no worker behind where the parent was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
