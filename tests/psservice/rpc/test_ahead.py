"""Bulk transfers: a message is received while a thread works on the one before, and made while that one is sent."""

import asyncio
import threading
import time
from types import SimpleNamespace

import grpc
import pytest

from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.awaiting import Waiters
from psservice.rpc import dispatcher
from psservice.rpc.auth import ANONYMOUS_ADMIN
from psservice.rpc.calls import RULES, Call
from psservice.rpc.dispatcher import Dispatcher
from psservice.rpc.open_call import OpenCall
from psservice.rpc.pool import Pool
from psservice.storage.environment import MACHINE

SECONDS = 20.0


class Client:
    """Stands for gRPC's context: messages that are there, and answers that somebody reads."""

    def __init__(self, messages=()):
        self.messages, self.written = [message.SerializeToString() for message in messages], []
        self.reads = 0
        self.has_read, self.may_write = threading.Event(), threading.Event()

    async def read(self):
        self.reads += 1
        if self.reads == 2:
            self.has_read.set()
        return self.messages.pop(0) if self.messages else grpc.aio.EOF

    async def write(self, data):
        await asyncio.to_thread(self.may_write.wait, SECONDS)
        self.written.append(data)


def serve(rpc, client, handler):
    async def run():
        settings = SimpleNamespace(stream_idle_seconds=SECONDS, stream_seconds=SECONDS, rpc_threads=4)
        shard = SimpleNamespace(
            settings=settings,
            metrics=SimpleNamespace(running_calls=Gauge(), queued=Gauge()),
            apply_thread=None,
            environment=MACHINE,
            leases=SimpleNamespace(waiters=Waiters()),
        )
        served = Dispatcher({rpc: handler}, None, shard)
        loop, task, rule = asyncio.get_running_loop(), asyncio.current_task(), RULES[rpc]
        call = Call(rpc, ANONYMOUS_ADMIN)
        opened = OpenCall(call, client, rule, Pool(rule.lane, 2, MACHINE), print, loop, task, time.monotonic())
        try:
            await served._answer(opened, await served._read_whole(opened, handler))
        finally:
            opened.end()
            served.close()
            assert served._ahead == 0

    asyncio.run(run())


class Gauge:
    def set_function(self, function):
        pass


def buffers(data=b"x"):
    return pb.UploadModelRequest(buffers=pb.BytesChunk(data=data))


@pytest.mark.parametrize("most", [0, 4])
def test_the_next_message_of_an_upload_is_received_while_a_thread_works_where_few_others_are(most, monkeypatch):
    monkeypatch.setattr(dispatcher, "_MOST_AHEAD", most)
    client = Client([buffers(), buffers()])

    def handler(call):
        yield
        assert client.has_read.wait(SECONDS if most else 0.1) is bool(most)
        while (yield) is not None:
            pass
        return pb.UploadModelResponse()

    client.may_write.set()
    serve("UploadModel", client, handler)
    assert client.written == [b""]
    assert client.reads == 3


def test_an_upload_that_is_refused_waits_for_no_further_message():
    client = Client([buffers()])
    first = client.read

    async def read():
        return await (asyncio.sleep(SECONDS) if client.reads else first())

    def handler(call):
        yield
        raise Rejected(ErrorCode.BAD_CHUNK, "not this")

    client.read = read
    began = time.monotonic()
    with pytest.raises(Rejected, match="not this"):
        serve("UploadModel", client, handler)
    assert time.monotonic() - began < SECONDS / 2


def test_the_next_answers_are_made_while_others_are_sent():
    client, made = Client([pb.DownloadModelRequest()]), []

    def answers(call, request):
        for number in range(3):
            made.append(number)
            if number == 1:
                client.may_write.set()  # the first is not sent before the second is made
            yield bytes([number]) * (1 << 20)

    serve("DownloadModel", client, answers)
    assert [data[0] for data in client.written] == made == [0, 1, 2]


def test_a_client_that_goes_away_ends_the_making_of_answers():
    client, ended = Client([pb.DownloadModelRequest()]), []

    async def write(data):
        raise grpc.aio.InternalError("gone")

    def answers(call, request):
        try:
            while True:
                time.sleep(0.01)
                yield bytes(1 << 20)
        finally:
            ended.append(True)

    client.write = write
    with pytest.raises(grpc.aio.InternalError, match="gone"):
        serve("DownloadModel", client, answers)
    assert ended
