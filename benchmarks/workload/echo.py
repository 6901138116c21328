"""The least that gRPC can do: ``python -m benchmarks.workload.echo REPLY_BYTES`` answers as a server without a model.

Two streams a worker stay open: a push goes up and an acknowledgement of the usual size comes down; a pull request goes
up and a reply of the given size comes down. Nothing is parsed. It prints its port, and ends at the end of stdin.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from pscore.net.proxies import NO_PROXY

_ACK_BYTES, _REQUEST_BYTES = 32, 100
_SERVICE = "echo"
_Handle = Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes]]


def _answer(answer: bytes) -> _Handle:
    async def handle(requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        async for _message in requests:
            yield answer

    return handle


async def _serve(reply_bytes: int) -> None:
    server = grpc.aio.server()
    calls = {"Push": _answer(bytes(_ACK_BYTES)), "Pull": _answer(bytes(reply_bytes))}
    handlers = {name: grpc.stream_stream_rpc_method_handler(call) for name, call in calls.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


class EchoWorker:
    """A worker whose server is an echo; see :class:`~benchmarks.workload.raw_worker.ReplayWorker`.

    Args:
        address: of the echo server.
        name: of the worker; not sent.
        messages: as of a worker that replays: a push has the bytes of all but the first.
    """

    def __init__(self, address: str, name: str, messages: Sequence[bytes]) -> None:
        self._channel = grpc.aio.insecure_channel(address, (("grpc.use_local_subchannel_pool", 1), *NO_PROXY))
        self._update = b"".join(messages[1:])
        self._pushes = self._channel.stream_stream(f"/{_SERVICE}/Push")()
        self._pulls = self._channel.stream_stream(f"/{_SERVICE}/Pull")()
        self.received = 0

    async def join(self) -> None:
        """Do nothing: an echo needs no lease."""

    async def push(self) -> None:
        """Send a push's bytes, wait for the answer."""
        await self._pushes.write(self._update)
        await self._pushes.read()

    async def exchange(self) -> None:
        """Send both before either answer is awaited."""
        await self._pushes.write(self._update)
        await self._pulls.write(bytes(_REQUEST_BYTES))
        await self._pushes.read()
        self.received += len(await self._pulls.read())

    async def leave(self) -> None:
        """End the connection."""
        await self._channel.close()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
