"""Counts what a push, a pull and a step enter: ``python -m tools.walks``; ``--tree DIR`` counts in another checkout.

A server with one shard, an asynchronous run and a journal runs in a process of its own; a worker sends it pushes and
pulls over streams that stay open, one at a time. In a third process an optimizer takes steps with such a server. A
profile function (``sys.setprofile``) notes what Python enters from the request to the answer and for a moment after
it. A function counts if most of the requests enter it, and most moments without a request do not. What is counted:

- own files and functions: those of psservice, psclient and pscore, without generated stubs. A lambda or comprehension
  belongs to the function around it.
- calls: entries into them, a coroutine's resumptions included.
- thread hops: how often the next entry is made by another thread than the last one.
- queue hops: puts into queues and executors, callbacks handed to a loop, notifications that a thread waits for.

Threads inside gRPC's core are not seen.
"""

import argparse
import collections
import itertools
import json
import os
import queue
import runpy
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

TREE = Path(os.environ.get("WALKS_TREE") or Path(__file__).resolve().parent.parent)
PACKAGES = tuple(f"{TREE / package}{os.sep}" for package in ("psservice", "psclient", "pscore"))
QUEUES = {"Queue.put", "Queue.put_nowait", "BaseEventLoop.call_soon_threadsafe", "Condition.notify"}
QUEUE_HOP = "(queue)"
SETTLE_SECONDS = 0.1
"""Time after an answer for what is done behind it."""

WARMUP, COUNTED = 30, 15
Entries = list[tuple[int, str]]
"""Each with its thread."""

FIGURES = ("own files", "functions", "calls", "thread hops", "queue hops")


class Walk(NamedTuple):
    """What one kind of request enters: its figures, and the names of its functions as ``file:function``."""

    figures: dict[str, float]
    functions: list[str]


class Recorder:
    """The profile function of all threads of a process; notes entries between :meth:`start` and :meth:`stop`."""

    def __init__(self) -> None:
        """Profile this thread and those that start from now on."""
        self._is_on = False
        self._entries: Entries = []
        self._names: dict[CodeType, str] = {}
        threading.setprofile(self)
        sys.setprofile(self)

    def start(self) -> None:
        """Begin a request."""
        self._entries = []
        self._is_on = True

    def stop(self) -> Entries:
        """Wait for what is done after the answer; return the entries since the start, each with its thread."""
        time.sleep(SETTLE_SECONDS)
        self._is_on = False
        return self._entries

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note an entry; the interpreter calls this at each."""
        if not self._is_on:
            return
        if event == "call":
            name = self._names.get(frame.f_code)
            if name is None:
                name = self._names[frame.f_code] = _name(frame.f_code)
            if name == QUEUE_HOP and not _hands_over(frame):
                return
        else:
            puts = event == "c_call" and argument.__name__ == "put"
            name = QUEUE_HOP if puts and isinstance(argument.__self__, queue.SimpleQueue) else ""
        if name:
            self._entries.append((threading.get_ident(), name))


def _name(code: CodeType) -> str:
    """Return ``file:function`` of own code, :data:`QUEUE_HOP` of what may hand over, and else nothing."""
    file, function = code.co_filename, code.co_qualname
    if not file.startswith(PACKAGES):
        return QUEUE_HOP if function in QUEUES else ""
    if "_pb2" in file:
        return ""
    while function.rpartition(".")[2].startswith("<"):  # a lambda, a comprehension
        function = function.rpartition(".<locals>.")[0]
    return f"{Path(file).relative_to(TREE)}:{function}" if function else ""


def _hands_over(frame: FrameType) -> bool:
    """Tell whether a call counts: a notification does if a thread waits, and if no queue makes it for its own put."""
    if frame.f_code.co_qualname != "Condition.notify":
        return True
    caller = frame.f_back
    return bool(frame.f_locals["self"]._waiters) and (caller is None or caller.f_code.co_filename != queue.__file__)


def usual_of(requests: list[Entries]) -> set[str]:
    """Return what most of the requests enter."""
    seen = collections.Counter(name for request in requests for name in {name for _, name in request})
    return {name for name, count in seen.items() if 2 * count > len(requests)}


def walk_of(requests: list[Entries], idle: list[Entries]) -> Walk:
    """Return what most requests enter and most moments without one do not, with medians of the calls and hops."""
    usual = usual_of(requests) - usual_of(idle) | {QUEUE_HOP}
    calls, hops, queues = [], [], []
    for request in requests:
        threads = [thread for thread, name in request if name in usual - {QUEUE_HOP}]
        calls.append(len(threads))
        hops.append(sum(one != other for one, other in itertools.pairwise(threads)))
        queues.append(sum(name == QUEUE_HOP for _, name in request))
    functions = sorted(usual - {QUEUE_HOP})
    files = {name.partition(":")[0] for name in functions}
    numbers = (len(files), len(functions), *(statistics.median(values) for values in (calls, hops, queues)))
    return Walk(dict(zip(FIGURES, numbers, strict=True)), functions)


class Server:
    """A shard in a process of its own, which notes what it enters if it is told to."""

    def __init__(self, folder: str) -> None:
        read_end, write_end = os.pipe()
        command = [sys.executable, "-P", __file__, "--role", "server", "--listen=127.0.0.1:0", f"--data-dir={folder}"]
        command += ["--buffers=none", "--down-mode=exact", "--health-listen=", "--metrics-listen=127.0.0.1:0"]
        command += ["--log-level=warning", "--lease-seconds=600", f"--ready-fd={write_end}"]
        command += [f"--parent-pid={os.getpid()}"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, pass_fds=(write_end,), stdin=pipe, stdout=pipe, text=True)
        os.close(write_end)
        with os.fdopen(read_end) as ready:
            self.address: str = json.loads(ready.readline())["address"]

    def record(self, request: Callable[[], object]) -> Entries:
        """Make a request; return what the server enters meanwhile."""
        self._ask("start")
        request()
        return self._ask("stop")

    def _ask(self, order: str) -> Entries:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(order, file=self._process.stdin, flush=True)
        answer: Entries = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """Stop the process."""
        self._process.terminate()
        self._process.communicate()


def serve(arguments: list[str]) -> None:
    """Be a server: obey the orders of standard input on a thread, and run ``psservice serve``."""
    recorder = Recorder()
    threading.setprofile(None)  # not the thread that obeys
    threading.Thread(target=_obey, args=(recorder,), daemon=True).start()
    threading.setprofile(recorder)
    sys.argv = ["psservice", "serve", *arguments]
    runpy.run_module("psservice", run_name="__main__")


def _obey(recorder: Recorder) -> None:
    for order in sys.stdin:
        if order == "start\n":
            recorder.start()
        print(json.dumps([] if order == "start\n" else recorder.stop()), flush=True)


def count_server(folder: str) -> dict[str, Walk]:
    """Send pushes and pulls to a server, each by itself; return the walks of both."""
    import grpc
    import numpy as np

    from benchmarks.workload.layouts import noise_push, one_tensor
    from benchmarks.workload.raw_worker import RawWorker, join_request, push_messages
    from pscore.wire.v1 import parameter_server_pb2 as pb
    from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub

    layout = one_tensor(50_000)
    server = Server(folder)
    requests: dict[str, list[Entries]] = {"push": [], "pull": [], "idle": []}
    try:
        with RawWorker(server.address, layout, "uploader") as uploader:
            uploader.pull()
        with grpc.insecure_channel(server.address) as channel:
            stub = ParameterServerServiceStub(channel)
            join = join_request(layout)
            join.identity.worker_id, join.identity.incarnation = "walker", "1"
            joined = stub.Join(join)
            join.identity.run_id = joined.run_id
            parts = push_messages(layout, noise_push(layout, 0.01, 0, np.random.default_rng(0)), 1 << 20)
            push = pb.PushSparseRequest.FromString(b"".join(parts))  # one message: each part has fields of its own
            push.header.identity.CopyFrom(join.identity)
            push.header.generation, push.header.base_version = joined.generation, joined.version
            push.header.step = 0
            pull = pb.PullDiffRequest(identity=join.identity, generation=joined.generation, has_base=True)
            pull.base_version = joined.version
            pushes: queue.SimpleQueue[Any] = queue.SimpleQueue()
            pulls: queue.SimpleQueue[Any] = queue.SimpleQueue()
            answers = stub.PushSparse(iter(pushes.get, None))
            replies = stub.PullDiff(iter(pulls.get, None))

            def send() -> None:
                push.header.step += 1
                pushes.put(push)
                next(answers)

            def fetch() -> None:
                pulls.put(pull)
                for reply in replies:
                    if reply.HasField("header"):
                        push.header.base_version = pull.base_version = reply.header.version
                        pull.acknowledged_reply = reply.header.reply_number
                    if reply.HasField("commit"):
                        return

            for _ in range(WARMUP + COUNTED):
                for name, request in (("push", send), ("pull", fetch), ("idle", lambda: None)):
                    requests[name].append(server.record(request))
            pushes.put(None)
            pulls.put(None)
    finally:
        server.close()
    return {name: walk_of(requests[name][WARMUP:], requests["idle"][WARMUP:]) for name in ("push", "pull")}


def count_step(folder: str) -> dict[str, Walk]:
    """Take steps with DGS; return the walk of one."""
    recorder = Recorder()
    import torch

    import psclient

    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(3)))
    requests, idle = [], []
    server = Server(folder)
    try:
        options: dict[str, Any] = {"model": model, "server": server.address, "worker": "walker"}
        with psclient.DGS(model.parameters(), lr=0.01, density=0.01, **options) as optimizer:
            for _ in range(WARMUP + COUNTED):
                optimizer.zero_grad()
                model(torch.randn(8, 128)).square().mean().backward()
                recorder.start()
                optimizer.step()
                requests.append(recorder.stop())
                recorder.start()
                idle.append(recorder.stop())
    finally:
        server.close()
    return {"step": walk_of(requests[WARMUP:], idle[WARMUP:])}


def main() -> int:
    """Print the table; return 0."""
    parser = argparse.ArgumentParser(prog="python -m tools.walks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tree", type=Path, default=TREE, help="checkout whose packages are counted")
    parser.add_argument("--functions", action="store_true", help="list the functions too")
    options = parser.parse_args()
    tree = options.tree.resolve()
    environment = os.environ | {"PYTHONPATH": str(tree), "WALKS_TREE": str(tree), "OMP_NUM_THREADS": "1"}
    walks = {}
    for role in ("push and pull", "step"):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-P", __file__, "--role", role, folder]
            answer = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        walks.update(json.loads(answer.stdout.splitlines()[-1]))
    print(f"{'':6}" + "".join(f"{figure:>13}" for figure in FIGURES))
    for name, (figures, names) in walks.items():
        print(f"{name:6}" + "".join(f"{figures[figure]:13.0f}" for figure in FIGURES))
        if options.functions:
            print("".join(f"  {function}\n" for function in names), end="")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--role"]:
        role, arguments = sys.argv[2], sys.argv[3:]
        if role == "server":
            serve(arguments)
        else:
            print(json.dumps(count_step(arguments[0]) if role == "step" else count_server(arguments[0])))
    else:
        sys.exit(main())
