"""A slow line: a TCP proxy on loopback that passes so many bytes a second on, or waits for a test's word."""

import asyncio
import socket
import threading
import time

_PIECE = 4 << 10
_BUFFER_BYTES = 16 << 10  # small, so that what a sender has got rid of has nearly arrived


class Line:
    """All connections to one address share it; each way by itself.

    Args:
        to: where it leads, HOST:PORT.
        rate: bytes a second, of all connections together, each way; 0 for no limit.

    Attributes:
        address: what to dial.
        up, down: bytes that were passed on.
    """

    def __init__(self, to, rate=0.0):
        self._host, port = to.rsplit(":", 1)
        self._port, self.rate = int(port), rate
        self.up = self.down = 0
        self._stops_at = {}  # way: bytes
        self._free = {"up": 0.0, "down": 0.0}
        self._writers = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def stop_at(self, way, nbytes):
        """Pass nothing more on than so many bytes of this way, counted from the beginning."""
        self._stops_at[way] = nbytes

    def go_on(self):
        self._stops_at.clear()

    def reset(self):
        """End every connection that is open, as a router that has forgotten them."""
        asyncio.run_coroutine_threadsafe(self._reset(), self._loop).result(30)

    def __enter__(self):
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self._thread.start()
        serving = asyncio.start_server(self._serve, sock=listener, limit=_BUFFER_BYTES)
        self._server = asyncio.run_coroutine_threadsafe(serving, self._loop).result(30)
        return self

    def __exit__(self, *_):
        async def end():
            self._server.close()
            await self._reset()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _reset(self):
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader, writer):
        try:
            theirs = await asyncio.open_connection(self._host, self._port, limit=_BUFFER_BYTES)
        except OSError:
            writer.close()
            return
        writers = {writer, theirs[1]}
        self._writers |= writers
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump("up", reader, theirs[1]))
                both.create_task(self._pump("down", theirs[0], writer))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            self._writers -= writers
            for each in writers:
                each.transport.abort()

    async def _pump(self, way, reader, writer):
        while piece := await reader.read(_PIECE):
            while getattr(self, way) >= self._stops_at.get(way, float("inf")):
                await asyncio.sleep(0.01)
            if self.rate:
                self._free[way] = max(time.monotonic(), self._free[way]) + len(piece) / self.rate
                await asyncio.sleep(self._free[way] - time.monotonic())
            setattr(self, way, getattr(self, way) + len(piece))
            writer.write(piece)
            await writer.drain()
        raise ConnectionResetError
