"""Virtual time, and calls between simulated clients and servers that may be slow, be cut, and lose answers."""

import asyncio
import selectors
from types import SimpleNamespace

import grpc.aio

from pscore.wire.errors import details_of
from psservice.rpc.calls import SERVICE

LONGEST_DELAY_SECONDS = 0.05


class StuckError(AssertionError):
    """Nothing can happen any more, and somebody waits."""


class CutError(Exception):
    """The connection broke, or the server is not there: nobody knows what became of the request."""


class RefusedError(Exception):
    """The server has refused a call."""

    def __init__(self, words, details):
        super().__init__(words)
        self.reason, self.retry_seconds, self.metadata = details.reason, details.retry_seconds, details.metadata


class VirtualTime(selectors.BaseSelector):
    """Where an event loop would wait, the clock moves on."""

    def __init__(self):
        self.now, self._map = 1000.0, {}

    def select(self, timeout=None):
        if timeout is None:
            raise StuckError("no timer runs, and somebody waits")
        self.now += max(0.0, timeout)
        return []

    def register(self, fileobj, events, data=None):
        self._map[fileobj] = selectors.SelectorKey(fileobj, 0, events, data)
        return self._map[fileobj]

    def unregister(self, fileobj):
        return self._map.pop(fileobj)

    def get_map(self):
        return self._map


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time; what happens depends on nothing but the seed."""

    def __init__(self):
        self.virtual = VirtualTime()
        super().__init__(self.virtual)

    def time(self):
        return self.virtual.now


class Line:
    """A slow line that answers share: it passes one message after another on, at so many bytes a second."""

    def __init__(self, loop, bytes_per_second):
        self._loop, self._rate, self._free_at = loop, bytes_per_second, 0.0
        self.nbytes = 0

    async def carry(self, raw):
        """Wait until a message is on the other side."""
        self.nbytes += len(raw)
        self._free_at = max(self._free_at, self._loop.time()) + len(raw) / self._rate
        await asyncio.sleep(self._free_at - self._loop.time())


class Link:
    """One call: the client's side, and the context that the server sees; ``line``: over which its answers come.

    Attributes:
        on_answer: called with each answer as the server sends it.
    """

    def __init__(self, host, rpc, random, *, cut_share=0.0, line=None):
        self._host, self._rpc, self._random, self.cut_share, self._line = host, rpc, random, cut_share, line
        self._up, self._down = asyncio.Queue(), asyncio.Queue()
        self.is_cut, self._task = not host.is_up, None
        self.on_answer = lambda raw: None
        if host.is_up:
            handler = host.service.service(SimpleNamespace(method=f"/{SERVICE.full_name}/{rpc}"))
            self._task = asyncio.ensure_future(handler.stream_stream(None, self))
            self._task.add_done_callback(self._ended)
            host.links.add(self)

    # The client's side

    async def send(self, *messages):
        """Send messages; each takes some time."""
        for message in messages:
            await self._pass()
            self._up.put_nowait(message.SerializeToString())

    async def end(self):
        """Send nothing any more."""
        await self._pass()
        self._up.put_nowait(grpc.aio.EOF)

    async def receive(self, kind):
        """Return the next answer; ``None`` at the end of the call."""
        answer = await self._down.get()
        if isinstance(answer, Exception):
            self._down.put_nowait(answer)  # of this call there is never another one
            raise answer
        if self._line is not None and answer is not None:
            await self._line.carry(answer)
        await self._pass()
        return None if answer is None else kind.FromString(answer)

    async def _pass(self):
        if self._random.random() < self.cut_share:
            self.cut()
        await asyncio.sleep(self._random.choice((0.0, 0.001, self._random.random() * LONGEST_DELAY_SECONDS)))
        if self.is_cut:
            raise CutError

    def cut(self):
        """Break the connection."""
        if not self.is_cut:
            self.is_cut = True
            if self._task is not None and not self._task.done():
                self._task.cancel()
        self._down.put_nowait(CutError())

    # The server's side: a grpc.aio.ServicerContext

    def _ended(self, task):
        self._host.links.discard(self)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, grpc.aio.AbortError):
            self._host.failed(error)
            self.cut()
        elif task.cancelled():
            self.cut()
        elif error is None:
            self._down.put_nowait(None)

    async def read(self):
        return await self._up.get()

    async def write(self, raw):
        self._host.require_alive()
        self.on_answer(raw)
        self._down.put_nowait(raw)

    async def abort_with_status(self, status):
        self._host.require_alive()
        call = SimpleNamespace(
            trailing_metadata=lambda: status.trailing_metadata,
            code=lambda: status.code,
            details=lambda: status.details,
        )
        self._down.put_nowait(RefusedError(status.details, details_of(call)))
        raise grpc.aio.AbortError

    async def abort(self, code, words):
        self._host.require_alive()
        if code is grpc.StatusCode.INTERNAL:
            self._host.failed(AssertionError(f"{self._rpc}: {words}"))
        self._down.put_nowait(CutError(words))  # a status without details decides nothing
        raise grpc.aio.AbortError

    def invocation_metadata(self):
        return ()

    def peer(self):
        return "ipv4:127.0.0.1:1"

    def auth_context(self):
        return {}

    def done(self):
        return self.is_cut

    cancelled = done
