"""``psservice serve`` as a process, as an operator starts it."""

import json
import os
import select
from contextlib import contextmanager
from pathlib import Path

from psclient.rpc.local_server import spawn
from verify.cluster.servers import free_ports

SHARDS = 3
START_SECONDS = 60


class Command:
    """A running ``psservice serve``, its log, and where it serves; empty addresses where it has ended instead."""

    def __init__(self, log: Path, **settings):
        self.log = log
        settings = {"shards": SHARDS, "listen": "127.0.0.1:0", "log_format": "json"} | settings
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        read_end, write_end = os.pipe()
        with log.open("a") as stream, os.fdopen(read_end) as ready:
            self.process = spawn([*flags, f"--ready-fd={write_end}"], write_end, stream)
            os.close(write_end)
            assert select.select([ready], [], [], START_SECONDS)[0]
            self.ready = json.loads(ready.readline() or "{}")
        self.address = self.ready.get("address", "")

    @property
    def shards(self):
        """The processes of shards, oldest first; at the start shard 0 is the oldest."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(word) for word in path.read_text().split()]

    def address_of(self, shard, kind="address"):
        host, port = self.ready[kind].rsplit(":", 1)
        return f"{host}:{int(port) + shard}"

    def lines(self):
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]


@contextmanager
def serving(log, **settings):
    command = Command(log, **settings)
    try:
        yield command
    finally:
        command.process.terminate()
        command.process.wait(60)


def ports_in_a_row(count):
    """Return the first of so many free ports."""
    found = free_ports(count)
    while found[-1] - found[0] != count - 1:
        found = [*found[1:], *free_ports(1)]
    return found[0]
