"""A bad network: a TCP proxy on loopback that cuts, delays, throttles and stalls connections, as a seed draws it.

Run as a process of its own, ``python -m verify.failpoint.proxy``, so that what it does to one connection waits for
nobody. It takes commands on its standard input, a word a line: ``rough``, ``calm``, ``cut`` (every open connection),
and prints how many connections got which fate when its input ends.
"""

import argparse
import asyncio
import contextlib
import json
import random
import socket
import struct
import sys
from collections import Counter
from dataclasses import dataclass

_PIECE = 16 << 10
_FATES = (
    ("plain", 35),
    ("delayed", 18),
    ("throttled", 15),
    ("cut on the way up", 14),
    ("answer lost", 12),
    ("stalled", 6),
)
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, no time; closing then resets


@dataclass(slots=True)
class Fate:
    """What happens to one connection.

    Attributes:
        kind: its name.
        delay: seconds that each piece waits.
        rate: bytes a second; 0 for no limit.
        up: bytes after which the way up ends everything; -1 for never.
        down: likewise, for the way down.
        stall: seconds of silence before that end.
        reset: whether it ends in a reset instead of an orderly close.
    """

    kind: str = "plain"
    delay: float = 0.0
    rate: float = 0.0
    up: int = -1
    down: int = -1
    stall: float = 0.0
    reset: bool = False


def draw(rng: random.Random) -> Fate:
    kind = rng.choices([name for name, _ in _FATES], [weight for _, weight in _FATES])[0]
    fate = Fate(kind, reset=rng.random() < 0.5)
    if kind == "delayed":
        fate.delay = rng.uniform(0.001, 0.04)
    elif kind == "throttled":
        fate.rate = rng.uniform(128e3, 2e6)
    elif kind == "cut on the way up":
        fate.up = int(2 ** rng.uniform(8, 18))
    elif kind == "answer lost":
        fate.down = int(2 ** rng.uniform(7, 15))
    elif kind == "stalled":
        fate.up, fate.stall = int(2 ** rng.uniform(8, 18)), rng.uniform(0.5, 4.0)
    return fate


class Proxy:
    """Listens for each shard and passes on."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._rough = False
        self._open: set[Connection] = set()
        self.counts: Counter[str] = Counter()

    async def listen(self, port: int) -> int:
        """Open a way to a shard's port; return the port to dial."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._pass_on(reader, writer, port)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        return int(server.sockets[0].getsockname()[1])

    def obey(self, command: str) -> None:
        """Change the weather, or cut."""
        if command == "cut":
            for connection in list(self._open):
                self.counts["cut at once"] += 1
                connection.end(reset=self._rng.random() < 0.5)
        else:
            self._rough = command == "rough"
            if not self._rough:
                for connection in self._open:
                    connection.fate = Fate()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        try:
            theirs = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            self.counts["no server there"] += 1
            writer.close()
            return
        fate = draw(self._rng) if self._rough else Fate()
        self.counts[fate.kind] += 1
        connection = Connection(fate, (reader, writer), theirs)
        self._open.add(connection)
        try:
            await connection.run()
        finally:
            self._open.discard(connection)


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Connection:
    def __init__(self, fate: Fate, ours: Ends, theirs: Ends) -> None:
        self.fate, self._ours, self._theirs = fate, ours, theirs

    async def run(self) -> None:
        """Pass bytes both ways until either way ends."""
        ways = [
            asyncio.ensure_future(self._pump(self._ours[0], self._theirs[1], upwards=True)),
            asyncio.ensure_future(self._pump(self._theirs[0], self._ours[1], upwards=False)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        self.end(reset=self.fate.reset)

    def end(self, *, reset: bool) -> None:
        """Close both ends."""
        for _, writer in (self._ours, self._theirs):
            connected = writer.get_extra_info("socket")
            if reset and connected is not None:
                with contextlib.suppress(OSError):
                    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()
            else:
                writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, upwards: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := await reader.read(_PIECE):
                fate = self.fate
                await asyncio.sleep(fate.delay + (len(data) / fate.rate if fate.rate else 0.0))
                limit = fate.up if upwards else fate.down
                if 0 <= limit <= passed + len(data):
                    writer.write(data[: limit - passed])
                    await writer.drain()
                    await asyncio.sleep(fate.stall)
                    return
                writer.write(data)
                passed += len(data)
                await writer.drain()


async def _work(ports: list[int], seed: int) -> None:
    proxy = Proxy(seed)
    print(json.dumps([await proxy.listen(port) for port in ports]), flush=True)
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        proxy.obey(line.decode().strip())
    print(json.dumps(proxy.counts), flush=True)


def main() -> int:
    """Run until the standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m verify.failpoint.proxy")
    parser.add_argument("--ports", type=int, nargs="+", required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    asyncio.run(_work(options.ports, options.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
