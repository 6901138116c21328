"""Real runs: server processes and load generators on loopback, watched for a while."""

import tempfile
import uuid
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import psutil

from benchmarks.harness.generators import Generators, NoStepError, Window
from benchmarks.harness.load_generator import write_frames
from benchmarks.workload.layouts import noise_push, one_tensor
from benchmarks.workload.raw_worker import join_request, zeros
from benchmarks.workload.replay_worker import CALL_SECONDS
from benchmarks.workload.streams import push_requests
from psclient.rpc.local_server import LocalServer
from pscore.net.proxies import NO_PROXY
from pscore.wire.frames import DEFAULT_CHUNK_BYTES
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub

CLIENT_PROCESSES = 2
"""That the clients of a run are dealt out to."""

_UPDATES = 2
"""Different updates of a worker, in turn: between two pulls of another one each counts for the union."""

_WARM_SECONDS = 1.0
_MOST_WARM_RUNS = 30


class Stage:
    """Servers with a model of zeros, and updates at random places for every client; a context manager.

    Args:
        size: elements of the model.
        density: of a push.
        shards: servers.
        workers: most clients that will be asked for.
        down_mode: of the servers.
        seed: of the updates.

    Attributes:
        layout: of the model.
        addresses: of the servers.
        processes: of the servers.
    """

    def __init__(self, size: int, density: float, shards: int, workers: int, down_mode: str, seed: int) -> None:
        """Start the servers and give them the model."""
        self._stack, self._density = ExitStack(), density
        self.layout, rng = one_tensor(size), np.random.default_rng(seed)
        try:
            server = self._stack.enter_context(
                LocalServer(shards, down_mode=down_mode, down_density=density, buffers="none", lease_seconds=600)
            )
            self.addresses, self.processes = server.addresses, [psutil.Process(each.pid) for each in server.processes]
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            self._frames = [self._write(folder / f"w{number:03}", rng) for number in range(workers)]
            self._upload()
        except BaseException:
            self._stack.close()
            raise

    def warm_up(self, workers: int) -> None:
        """Let clients work until steps end: the servers compile their loops, on a new machine for many seconds."""
        for _ in range(_MOST_WARM_RUNS):
            try:
                self.run(workers, 0.0, 1.0)
            except NoStepError:
                continue
            return
        raise NoStepError(f"no step ended in {_MOST_WARM_RUNS} runs of {workers} clients")

    def run(self, workers: int, think: float, seconds: float, *, pulls: bool = True) -> Window:
        """Let clients work, and watch them for a while; the beginning is not counted."""
        frames, flags = self._frames[:workers], [f"--think={think}", *(["--pulls"] if pulls else [])]
        names = [path.name for path in frames]
        with Generators(",".join(self.addresses), frames, names, CLIENT_PROCESSES, *flags) as generators:
            first, *others = self.processes
            return generators.measure(first, seconds, _WARM_SECONDS + 2 * think, others)

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _write(self, path: Path, rng: np.random.Generator) -> Path:
        """Encode one worker's updates, each with the parts of all shards."""
        shards, frames = len(self.addresses), list[bytes]()
        for _ in range(_UPDATES):
            push = noise_push(self.layout, self._density, 0, rng)
            for shard, span in enumerate(self.layout.shard_spans(shards)):
                part = push.clip(span)
                assert part is not None
                join = join_request(self.layout, shard, shards).SerializeToString()
                messages = push_requests(pb.WorkerIdentity(), part, [span], chunk_bytes=DEFAULT_CHUNK_BYTES)
                frames += [join, *(message.SerializeToString() for message in messages), b""]
        write_frames(path, frames[:-1])
        return path

    def _upload(self) -> None:
        generation, run_id, incarnation = 0, "", str(uuid.uuid4())
        spans = self.layout.shard_spans(len(self.addresses))
        for shard, (address, span) in enumerate(zip(self.addresses, spans, strict=True)):
            with grpc.insecure_channel(address, NO_PROXY) as channel:
                stub = ParameterServerServiceStub(channel)
                request = join_request(self.layout, shard, len(spans))
                request.identity.worker_id, request.identity.incarnation = "uploader", incarnation
                request.identity.run_id = run_id
                joined: pb.JoinResponse = stub.Join(request, timeout=CALL_SECONDS)
                if shard == 0:  # the coordinator says which generation it is
                    generation, run_id = joined.generation, joined.run_id
                request.identity.run_id = run_id
                stub.UploadModel(zeros(request.identity, generation, span, DEFAULT_CHUNK_BYTES), timeout=CALL_SECONDS)
                stub.Leave(pb.LeaveRequest(identity=request.identity), timeout=CALL_SECONDS)
