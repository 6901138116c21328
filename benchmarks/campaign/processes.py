"""Servers and workers as processes of their own, forked from one that has loaded everything: there in milliseconds.

They are the real thing, ``psservice serve`` and psclient over loopback; only the seconds of importing are saved, which
hundreds of runs would otherwise pay for again and again.
"""

import json
import multiprocessing
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from benchmarks.harness.children import ChildFailedError
from benchmarks.network import lab

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["benchmarks.campaign.preload"])
_START_SECONDS, _STOP_SECONDS = 120.0, 30.0


@contextmanager
def server(settings: dict[str, object], space: str = "") -> Iterator[str]:
    """Run a server for the body; yields its address.

    Args:
        settings: those of ``psservice serve`` that are not at their defaults.
        space: network namespace that it runs in.

    Raises:
        ChildFailedError: it does not come up, or does not end.
    """
    announced, announces = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_serve, args=(announces, settings, space), name="server", daemon=True)
    process.start()
    announces.close()
    try:
        with os.fdopen(os.dup(announced.fileno())) as stream:
            readable, _, _ = select.select([stream], [], [], _START_SECONDS)
            line = stream.readline() if readable else ""
        if not line:
            raise ChildFailedError("the server did not come up; its message is above")
        yield json.loads(line)["address"]
        process.terminate()
        process.join(_STOP_SECONDS)
        if process.exitcode != 0:
            raise ChildFailedError(f"the server ended with status {process.exitcode}")
    finally:
        if process.is_alive():
            process.kill()
        process.join()
        announced.close()


def _serve(announces: Connection, settings: dict[str, object], space: str) -> None:
    from psservice.cli import main as cli

    if space:
        lab.enter(space)
    given: dict[str, object] = {
        "listen": "127.0.0.1:0",
        "health_listen": "",
        "metrics_listen": "",
        "device": "cpu",
        "compute_threads": 1,
        "log_format": "text",
        "log_level": "warning",
        "ready_fd": os.dup(announces.fileno()),
        "parent_pid": os.getppid(),
    }
    flags = []
    for name, value in (given | settings).items():
        flag = name.replace("_", "-")
        flags.append((f"--{flag}" if value else f"--no-{flag}") if isinstance(value, bool) else f"--{flag}={value}")
    announces.close()
    raise SystemExit(cli.main(["serve", *flags]))
