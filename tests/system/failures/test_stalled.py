"""Clients that stall, dawdle or send too much: each is cut or refused, and the others are served meanwhile."""

import threading
import zlib

import grpc
import psutil
import pytest
import torch
from safetensors.torch import save_file

import psclient
from psclient.errors import Transient, from_rpc_error
from psclient.rpc.local_server import LocalServer
from pscore.wire.errors import ErrorCode
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from tests.system.raw import TIMEOUT, N, dense_chunk, joined
from tests.system.tools import QUICK, assert_same_parameters, run_of, wait_until

IDLE = 0.4
SERVICE = "/sparseps.v1.ParameterServerService/"


ONE = b"\0\0\x80\x3f"


def header(worker):
    return pb.PushSparseRequest(header=worker.push_header())


def chunk(worker, first, count):
    return pb.PushSparseRequest(chunks=[dense_chunk(ONE * count, first)])


class Stalling:
    """A stream of requests that ends when the test says so."""

    def __init__(self, *messages):
        self._messages, self.done = messages, threading.Event()

    def __iter__(self):
        yield from self._messages
        self.done.wait(TIMEOUT)


def stalled_stream(worker, method, *messages):
    """Open any method as a client stream that sends these and no more; return the call and its stream."""
    stream = Stalling(*messages)
    serialize = [type(message).SerializeToString for message in messages][:1] or [bytes]
    call = worker.channel.stream_unary(SERVICE + method, serialize[0])
    return call.future(iter(stream), timeout=TIMEOUT), stream


def cut(server, rpc, why):
    value = server._metrics.registry.get_sample_value("psservice_calls_cut_total", {"rpc": rpc, "why": why})
    return value or 0.0


def in_flight(server):
    return server._metrics.registry.get_sample_value("psservice_bytes_in_flight")


def busy(call):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    failure = from_rpc_error(caught.value)
    return isinstance(failure, Transient) and failure.reason is ErrorCode.BUSY and failure.retry_seconds > 0


# Stalled


def pushed(worker):
    """Push; again if other load has kept this process from sending until the server took it for stalled, too."""
    while True:
        try:
            return worker.push([1], [1.0])
        except grpc.RpcError as error:
            if error.details() != "the call was cut: idle_request":
                raise


@pytest.mark.parametrize("rpc", ["PushSparse", "UploadModel", "ExchangeBuffers", "Join", "GetStatus", "PullDiff"])
def test_more_streams_than_threads_that_send_nothing_hold_no_thread(start, rpc):
    server = start(stream_idle_seconds=IDLE)
    worker = joined(server.address)
    calls = [stalled_stream(worker, rpc) for _ in range(10)]
    assert pushed(worker).version == 1  # waits in the queue until threads are free
    wait_until(lambda: cut(server, rpc, "idle_request") >= 10)
    for call, stream in calls:
        stream.done.set()
        assert call.exception(TIMEOUT).code() is grpc.StatusCode.CANCELLED


def test_a_push_that_stops_in_the_middle_is_dropped_and_its_bytes_are_free(start):
    server = start(stream_idle_seconds=IDLE)
    worker = joined(server.address)
    call, stream = stalled_stream(worker, "PushSparse", header(worker), chunk(worker, 0, 100))
    wait_until(lambda: in_flight(server) > 1000)
    wait_until(lambda: cut(server, "PushSparse", "idle_request") == 1)
    wait_until(lambda: in_flight(server) == 0)
    stream.done.set()
    assert call.exception(TIMEOUT).code() is grpc.StatusCode.CANCELLED
    assert pushed(worker).version == 1  # the same step, whole


@pytest.mark.parametrize("rpc", ["DownloadModel", "PullDiff"])
def test_answers_that_are_not_read_hold_no_thread(start, rpc, tmp_path):
    size = 4_000_000
    save_file({"w": torch.zeros(size)}, tmp_path / "large.safetensors")
    server = start(stream_idle_seconds=IDLE, init=tmp_path / "large.safetensors")
    worker = joined(server.address, size)
    pull = pb.PullDiffRequest(identity=worker.identity, generation=worker.generation)
    request = iter([pull]) if rpc == "PullDiff" else pb.DownloadModelRequest()
    calls = [getattr(worker.stub, rpc)(request, timeout=TIMEOUT) for _ in range(6)]
    assert pushed(worker).version == 1
    wait_until(lambda: not server._dispatcher.open_calls)  # cut, or gone wholly into the connection's own buffers
    for call in calls:
        call.cancel()
    wait_until(lambda: in_flight(server) == 0)


def test_a_stream_that_dawdles_ends_at_last(start):
    server = start(stream_idle_seconds=30, stream_seconds=IDLE)
    worker, done = joined(server.address), threading.Event()

    def dawdling():
        yield header(worker)
        for first in range(N):
            yield chunk(worker, first, 1)
            if done.wait(0.05):
                return

    call = worker.stub.PushSparse(dawdling(), timeout=TIMEOUT)
    wait_until(lambda: cut(server, "PushSparse", "too_long") == 1)
    done.set()
    assert call.exception(TIMEOUT).code() is grpc.StatusCode.CANCELLED
    assert pushed(worker).version == 1


def test_one_message_is_asked_for_where_one_is_due(start):
    worker = joined(start().address)
    call = worker.channel.stream_unary(SERVICE + "GetStatus", bytes)
    with pytest.raises(grpc.RpcError, match="exactly one message") as caught:
        call(iter([]), timeout=TIMEOUT)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_backward_pass_longer_than_the_idle_time_costs_one_push_sent_twice(start):
    """With overlap a push stays open during backward; one that is cut is sent again by itself, and counts once."""
    server = start(stream_idle_seconds=IDLE)
    first, last = (torch.nn.Parameter(torch.zeros(50)) for _ in range(2))
    settings = QUICK.model_copy(update={"bucket_bytes": 1})
    with psclient.GradientDropping(
        [first, last], lr=1.0, density=0.1, server=server.address, overlap=True, settings=settings
    ) as optimizer:
        total, slow = torch.zeros(2, 50), True

        def linger(gradient):
            if slow:
                wait_until(lambda: cut(server, "PushSparse", "idle_request") == 1)

        first.register_hook(linger)
        for _ in range(3):
            gradients = torch.randn(2, 50)
            total += gradients
            optimizer.zero_grad()
            ((first * gradients[0]).sum() + (last * gradients[1]).sum()).backward()  # what comes last is first here
            optimizer.step()
            slow = False
        optimizer.pull()
        assert optimizer.version == 3
        for parameter, given in ((first, total[0]), (last, total[1])):
            held = optimizer.state[parameter]["residual"]
            torch.testing.assert_close(given, held - parameter.detach(), rtol=1e-5, atol=1e-5)


# Too much


def test_a_second_stream_of_a_worker_is_busy_while_the_first_holds_its_share(start):
    server = start(memory_bytes=4_000_000)
    size = 40_000  # more than a batch: decoded at once, also where the header was read alone
    worker, other = joined(server.address, size), joined(server.address, size)
    call, stream = stalled_stream(worker, "PushSparse", header(worker), chunk(worker, 0, size))
    wait_until(lambda: in_flight(server) > 900_000)
    assert busy(lambda: worker.push(list(range(size)), [1.0] * size))
    assert other.push(list(range(size)), [1.0] * size).version == 1
    stream.done.set()
    assert call.exception(TIMEOUT).code() is grpc.StatusCode.INVALID_ARGUMENT  # it has no commit
    worker.step = 0
    assert worker.push(list(range(size)), [1.0] * size).version == 2
    wait_until(lambda: in_flight(server) == 0)


def test_every_push_is_busy_while_one_holds_the_total_and_that_one_gets_through(start):
    size = 10_000
    server = start(memory_bytes=225_000)
    worker, other = joined(server.address, size), joined(server.address, size)
    rest = threading.Event()

    def in_two_parts():
        yield header(worker)
        yield chunk(worker, 0, size // 2)
        rest.wait(TIMEOUT)
        yield chunk(worker, size // 2, size // 2)
        yield pb.PushSparseRequest(commit=pb.Commit(chunks=2, entries=size, crc32=zlib.crc32(ONE * size)))

    call = worker.stub.PushSparse(in_two_parts(), timeout=TIMEOUT)
    wait_until(lambda: in_flight(server) > 120_000)
    assert busy(lambda: other.push(list(range(size)), [1.0] * size))
    other.pull()  # answers have a share of their own
    rest.set()
    assert next(call).version == 1
    other.step = 0
    assert other.push(list(range(size)), [1.0] * size).version == 2


def test_a_horde_of_tiny_chunks_is_refused(start):
    server = start()
    worker = joined(server.address, size=100_000)

    def horde():
        yield header(worker)
        for first in range(0, worker.size, 50):
            yield pb.PushSparseRequest(chunks=[dense_chunk(ONE, first + each) for each in range(50)])

    with pytest.raises(grpc.RpcError, match="larger chunks") as caught:
        next(worker.stub.PushSparse(horde(), timeout=TIMEOUT))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    wait_until(lambda: in_flight(server) == 0)
    assert pushed(worker).version == 1


def test_workers_train_however_small_the_limits_are(start):
    server = start(memory_bytes=1)
    models = [torch.nn.BatchNorm1d(8) for _ in range(2)]
    optimizers = [
        psclient.GradientDropping(
            model.parameters(), lr=0.1, density=0.5, model=model, server=server.address, worker=f"w{i}", settings=QUICK
        )
        for i, model in enumerate(models)
    ]

    def train(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()

    threads = [threading.Thread(target=train, args=pair) for pair in zip(models, optimizers, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert server.shard.model.version == 6
    for optimizer in optimizers:
        optimizer.close()
    wait_until(lambda: in_flight(server) == 0)


@pytest.mark.long
def test_memory_stays_flat_however_many_streams_are_broken_off():
    size = 200_000
    with LocalServer(lease_seconds=120, stream_idle_seconds=IDLE) as server:
        parameter = torch.nn.Parameter(torch.zeros(size))
        optimizer = psclient.ASGD([parameter], lr=0.1, server=server, worker="good", settings=QUICK)
        process = psutil.Process(server.processes[0].pid)
        channel = grpc.insecure_channel(server.addresses[0])
        stub = ParameterServerServiceStub(channel)
        shard = run_of(optimizer).shards[0]
        opening = pb.PushHeader(identity=run_of(optimizer).identity, generation=shard.generation)
        opening.step = 1 << 40
        opening.plan.add(start=0, length=size)
        values = ONE * size

        def broken(kind):
            yield pb.PushSparseRequest(header=opening)
            if kind == "horde":
                for first in range(5_000):
                    yield pb.PushSparseRequest(chunks=[dense_chunk(ONE, first)])
            else:
                yield pb.PushSparseRequest(chunks=[dense_chunk(values)])

        def round_of_them():
            for kind in ("horde", *["cut"] * 3):
                with pytest.raises(grpc.RpcError):
                    next(stub.PushSparse(broken(kind), timeout=TIMEOUT))
            parameter.grad = torch.ones(size)
            optimizer.step()

        for _ in range(2):
            round_of_them()
        before, threads = process.memory_info().rss, process.num_threads()
        for _ in range(5):
            round_of_them()
        assert optimizer.version == 7
        assert process.memory_info().rss - before < 24 << 20  # a leak of every second stream would be more
        assert process.num_threads() <= threads + 64
        channel.close()


def test_nothing_is_left_in_flight_by_a_whole_training(start):
    server = start()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    with psclient.DGS(model.parameters(), lr=0.1, density=0.5, model=model, server=server.address) as optimizer:
        for _ in range(25):  # an exchange of buffers is among them
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
        assert_same_parameters(model, server.address)
    assert in_flight(server) == 0
