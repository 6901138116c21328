"""A worker that pushes whole numbers until it is told to rest, and then says what it has pushed.

Sums of whole numbers are exact in fp32, in any order: so at rest the server's model must be minus the sum of what all
workers have pushed, to the last bit. Lost or doubled entries would show.

Commands come on stdin, a line each: ``rest`` (flush, and wait), ``report FILE`` (pull, and write down what is known),
``go`` and ``end``; each is answered by a line ``done``.
"""

import os
import queue
import sys
import threading
import time

import torch

import psclient
from psclient.settings import ClientSettings

SIZE = 3000
_PAUSE_SECONDS = 0.02  # between steps: others want to compute too
_SETTINGS = {"deadline_seconds": 3, "connect_seconds": 120, "patience_seconds": 300, "dense_below": 0}


def main() -> None:
    server, name, overlap = sys.argv[1], sys.argv[2], sys.argv[3] == "overlap"
    commands: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    threading.Thread(target=read, args=(commands,), daemon=True).start()
    generator = torch.Generator().manual_seed(sum(name.encode()))
    w = torch.nn.Parameter(torch.zeros(SIZE))
    total = torch.zeros(SIZE)
    with psclient.GradientDropping(
        [w], lr=1.0, density=0.05, server=server, worker=name, overlap=overlap, settings=ClientSettings(**_SETTINGS)
    ) as optimizer:
        resting = False
        for step in range(1, sys.maxsize):
            while resting or not commands.empty():
                command, *arguments = commands.get()
                if command == "end":
                    break
                if command == "rest":
                    optimizer.flush()
                    resting = True
                elif command == "report":
                    optimizer.pull()
                    known = {"total": total, "replica": w.detach(), "server": psclient.download(server)["parameter_0"]}
                    torch.save(known | {"threads": count("task"), "files": count("fd")}, arguments[0])
                elif command == "go":
                    resting = False
                print("done", flush=True)
            else:
                gradient = torch.randint(-8, 9, (SIZE,), generator=generator).float()
                total += gradient
                optimizer.zero_grad()
                (w * gradient).sum().backward()
                optimizer.step()
                print("step", step, optimizer.live_workers, flush=True)
                time.sleep(_PAUSE_SECONDS)
                continue
            break
    print("done", flush=True)


def count(what: str) -> int:
    """Count this process's threads (``task``) or open files (``fd``)."""
    return len(os.listdir(f"/proc/self/{what}"))


def read(commands: "queue.SimpleQueue[list[str]]") -> None:
    for line in sys.stdin:
        commands.put(line.split())
    os._exit(1)  # the test is gone


if __name__ == "__main__":
    main()
