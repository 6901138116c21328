"""One shard inside this process: the server's own engine and stream reader, with no gRPC between."""

import uuid
from collections.abc import Iterator, Sequence

import torch

from benchmarks.workload.layouts import GROUP_ELEMENTS, groups
from benchmarks.workload.streams import push_requests
from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire import frames
from pscore.wire.codecs.names import READABLE_INDEX_CODECS
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.model.parameters import ModelShard
from psservice.observability.metrics import Metrics
from psservice.replies.reply_session import PullRequest, Reply, ReplyMode
from psservice.settings import ServerSettings
from psservice.shard.join import join
from psservice.shard.lifecycle import open_shard
from psservice.shard.model_install import finish_upload, open_upload
from psservice.shard.pull import pull
from psservice.shard.push import check_push, prepare_push
from psservice.state.stream_readers import read_all, read_push
from psservice.values import Identity, PushAnswer

_LEASE_SECONDS = 3600.0


class InProcessShard:
    """The engine of a server with one shard and one worker, ready to take pushes.

    Args:
        layout: the model; its values are zeros.
        down_mode: how pulls are answered.
        device: of the parameters.
        **settings: further settings of the server.
    """

    def __init__(self, layout: ModelLayout, down_mode: str, device: str = "cpu", **settings: object) -> None:
        """Join and upload."""
        values = {"down_mode": down_mode, "buffers": "none", "lease_seconds": _LEASE_SECONDS, **settings}
        self.layout = layout
        self.settings = ServerSettings.model_validate(values)
        self.shard = open_shard(self.settings, torch.device(device), Metrics())
        self.identity = Identity("bench", str(uuid.uuid4()))
        request = pb.JoinRequest(method="bench", index_codecs=READABLE_INDEX_CODECS)
        joined = join(self.shard, self.identity, layout, request)
        self.generation = joined.generation
        self.span = Span(0, layout.size)
        upload, checksum = open_upload(self.shard, self.identity, self.generation, 0), frames.Checksum()
        call = upload.go_on()
        zeros = SparseSlice(self.span, None, torch.zeros(layout.size))
        for chunk, _ in frames.encode(zeros, chunk_bytes=self.settings.chunk_bytes):
            checksum.add(chunk)
            upload.read(call, chunk)
        upload.verify(call, checksum.commit())
        finish_upload(self.shard, upload, 0)
        self._groups = groups(layout, GROUP_ELEMENTS)
        self._step = 0
        self._acknowledged = 0

    @property
    def model(self) -> ModelShard:
        """The parameters."""
        return self.shard.require_model(None)

    def push_messages(self, push: SparseSlice, dtype: torch.dtype = torch.float32) -> list[pb.PushSparseRequest]:
        """Write a push as the worker does; each has the next step."""
        self._step += 1
        identity = pb.WorkerIdentity(
            run_id=self.shard.run.run_id, worker_id=self.identity.worker_id, incarnation=self.identity.incarnation
        )
        requests = push_requests(
            identity,
            push,
            self._groups,
            step=self._step,
            generation=self.generation,
            base_version=self.model.version,
            chunk_bytes=self.settings.chunk_bytes,
            dtype=dtype,
        )
        return list(requests)

    def read(self, messages: Sequence[pb.PushSparseRequest]) -> tuple[pb.PushHeader, SparseSlice | None]:
        """Decode and validate a push, as the server does while it arrives."""

        def admit(header: pb.PushHeader) -> tuple[Span, torch.dtype]:
            check_push(self.shard, self.identity, header.step)
            return self.shard.span, self.shard.value_dtype

        header, entries, _ = read_all(read_push(admit), messages)
        return header, entries

    def apply(
        self, header: pb.PushHeader, entries: SparseSlice | None, messages: Sequence[pb.PushSparseRequest] = ()
    ) -> PushAnswer:
        """Apply a push that has been read; the messages go into the journal, where there is one."""
        raw = [message.SerializeToString() for message in messages]
        answer, repeated = self.shard.apply_thread.run(prepare_push(self.shard, header, entries, raw))
        self.shard.durability.records.wait()
        assert not repeated
        return answer

    def commit(self, push: SparseSlice) -> None:
        """Apply a push without a wire."""
        self._step += 1
        identity = pb.WorkerIdentity(worker_id=self.identity.worker_id, incarnation=self.identity.incarnation)
        base, generation = self.model.version, self.generation
        header = pb.PushHeader(identity=identity, step=self._step, generation=generation, base_version=base, samples=1)
        self.shard.apply_thread.run(prepare_push(self.shard, header, push))

    def pull(self, base_version: int) -> Reply:
        """Ask for an exact reply from a version on."""
        reply = self._pull(base_version, image=False)
        assert reply.mode is ReplyMode.EXACT
        return reply

    def open_image(self) -> None:
        """Take the exact reply that opens an image; what follows is top-k."""
        self._acknowledged = self._pull(None, image=False).number

    def pull_topk(self) -> Reply:
        """Acknowledge the last reply and ask for the next top-k one."""
        reply = self._pull(self.model.version, image=True)
        assert reply.mode is ReplyMode.TOPK
        self._acknowledged = reply.number
        return reply

    def pull_messages(self, reply: Reply) -> Iterator[pb.PullDiffResponse]:
        """Write a reply as the server does."""
        mode = pb.REPLY_MODE_EXACT if reply.mode is ReplyMode.EXACT else pb.REPLY_MODE_TOPK
        header = pb.PullHeader(
            mode=mode,
            version=reply.version,
            reply_number=reply.number,
            changed_density=reply.changed_density,
            image=reply.image,
            run_state=pb.RUN_STATE_TRAINING,
        )
        yield pb.PullDiffResponse(header=header)
        yield from map(pb.PullDiffResponse.FromString, reply.messages)

    def close(self) -> None:
        """Stop the engine's threads."""
        self.shard.close()

    def _pull(self, base_version: int | None, *, image: bool) -> Reply:
        request = PullRequest(base_version, self._acknowledged, image)
        return pull(self.shard, self.shard.leases.require(self.identity), self.generation, request)
