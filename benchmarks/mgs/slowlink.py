"""A link on which each message has a start-up cost: a proxy on loopback that reads HTTP/2 and lets messages queue.

Run as a process of its own, ``python -m benchmarks.mgs.slowlink``; it prints its port, and ends with its standard
input. On the way up, each gRPC message occupies the link for ``--startup`` seconds and its bytes for ``1/--rate``
seconds each, one message after the other, as on a card with a queue. The way down passes at once.
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEAD, _MESSAGE_HEAD = 9, 5
_DATA = 0
_PIECE = 256 << 10


class MessageCounter:
    """Counts the gRPC messages that begin in the DATA frames of one stream."""

    def __init__(self) -> None:
        self._head = b""
        self._left = 0

    def feed(self, data: bytes) -> int:
        """Read the next bytes; return how many messages' heads are complete in them."""
        begun = 0
        while data:
            if self._left:
                skipped = min(self._left, len(data))
                self._left -= skipped
                data = data[skipped:]
                continue
            wanted = _MESSAGE_HEAD - len(self._head)
            self._head, data = self._head + data[:wanted], data[wanted:]
            if len(self._head) == _MESSAGE_HEAD:
                self._left, self._head = int.from_bytes(self._head[1:]), b""
                begun += 1
        return begun


class SlowLink:
    """Passes connections on to a port.

    Args:
        port: the server's.
        startup: seconds that each message occupies the link for.
        rate: bytes a second; 0 for no limit.
    """

    def __init__(self, port: int, startup: float, rate: float) -> None:
        self._port, self._startup, self._rate = port, startup, rate
        self._free = 0.0

    async def listen(self) -> int:
        """Return the port to dial."""
        server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        return int(server.sockets[0].getsockname()[1])

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs = await asyncio.open_connection("127.0.0.1", self._port)
        ways = [asyncio.ensure_future(self._up(reader, theirs[1])), asyncio.ensure_future(_down(theirs[0], writer))]
        with contextlib.suppress(asyncio.CancelledError):  # the process ends
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        writer.close()
        theirs[1].close()

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read frame after frame as they come, and let each through when the link has had its time for it."""
        waiting: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue()

        async def release() -> None:
            while (entry := await waiting.get()) is not None:
                due, data = entry
                if (seconds := due - time.perf_counter()) > 0:
                    await asyncio.sleep(seconds)
                writer.write(data)
                await writer.drain()

        releasing = asyncio.ensure_future(release())
        streams: dict[int, MessageCounter] = {}
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            writer.write(await reader.readexactly(len(_PREFACE)))
            while True:
                head = await reader.readexactly(_FRAME_HEAD)
                data = await reader.readexactly(int.from_bytes(head[:3]))
                messages = 0
                if head[3] == _DATA:
                    stream = int.from_bytes(head[5:9])
                    messages = streams.setdefault(stream, MessageCounter()).feed(data)
                waiting.put_nowait((self._occupy(messages, len(data)), head + data))
        waiting.put_nowait(None)
        await releasing

    def _occupy(self, messages: int, nbytes: int) -> float:
        """Return when the link is through with so much."""
        took = messages * self._startup + (nbytes / self._rate if self._rate else 0.0)
        self._free = max(self._free, time.perf_counter()) + took
        return self._free


async def _down(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_PIECE):
            writer.write(data)
            await writer.drain()


@contextmanager
def slow_link(address: str, startup: float, rate: float) -> Iterator[str]:
    """Run a link to a server in a process of its own; yield the address to dial.

    Args:
        address: ``HOST:PORT`` on this machine.
        startup: seconds a message.
        rate: bytes a second; 0 for no limit.
    """
    options = ["--port", address.rpartition(":")[2], "--startup", str(startup), "--rate", str(rate)]
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.mgs.slowlink", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()


async def _work(port: int, startup: float, rate: float) -> None:
    print(await SlowLink(port, startup, rate).listen(), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main() -> int:
    """Run until the standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mgs.slowlink")
    parser.add_argument("--port", type=int, required=True, help="the server's, on this machine")
    parser.add_argument("--startup", type=float, required=True, help="seconds a message")
    parser.add_argument("--rate", type=float, default=0.0, help="bytes a second; 0 for no limit")
    options = parser.parse_args()
    asyncio.run(_work(options.port, options.startup, options.rate))
    return 0


if __name__ == "__main__":
    sys.exit(main())
