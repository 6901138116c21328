"""A worker's replica of one shard: asked for by version and reply number, written to or added to, as the reply says."""

import numpy as np

from pscore.wire.v1 import parameter_server_pb2 as pb
from verify.client.wire import Floats, Line, Offsets, Reply, digest, entries_of

_NO_OFFSETS: Offsets = np.empty(0, np.uint32)
_NO_VALUES: Floats = np.empty(0, np.float32)


class BrokenReplyError(Exception):
    """A reply ended without a header or a commit, and without an error."""


class Replica:
    """What one life of a worker knows of one shard.

    Attributes:
        index: of the shard.
        start: first index that it owns.
        generation: of its model.
        version: of the replica; ``None`` before the first reply.
        values: fp32 ``[length]``.
    """

    def __init__(self, index: int, incarnation: str) -> None:
        """Begin without anything; :meth:`begin` comes when the shard is joined."""
        self.index, self.start, self.generation = index, 0, 0
        self.version: int | None = None
        self.values: Floats = _NO_VALUES
        self._incarnation = incarnation
        self._number, self._image = 0, False
        self._next: Floats = _NO_VALUES

    def begin(self, start: int, length: int, generation: int) -> None:
        """Make room; nothing is known yet."""
        self.start, self.generation = start, generation
        self.values = np.full(length, np.nan, np.float32)

    def ask(self, identity: pb.WorkerIdentity, line: Line, timeout: float) -> Reply:
        """Ask for what the replica lacks; nothing changes before :meth:`apply`."""
        request = pb.PullDiffRequest(
            identity=identity,
            generation=self.generation,
            has_base=self.version is not None,
            base_version=self.version or 0,
            acknowledged_reply=self._number,
            image=self._image,
        )
        header: pb.PullHeader | None = None
        pieces: list[tuple[Offsets, Floats]] = []
        whole = committed = False
        for message in line.stub.PullDiff(iter([request]), timeout=timeout):
            if message.HasField("header"):
                header = message.header
            for chunk in message.chunks:
                pieces.append(entries_of(chunk, self.start))
                whole |= chunk.index_codec == pb.INDEX_CODEC_DENSE
            committed |= message.HasField("commit")
        if header is None or not committed:
            raise BrokenReplyError("a reply without a header or a commit, and no error")
        offsets = np.concatenate([_NO_OFFSETS, *(offsets for offsets, _ in pieces)])
        values = np.concatenate([_NO_VALUES, *(values for _, values in pieces)])
        topk = header.mode == pb.REPLY_MODE_TOPK
        self._next = self.values.copy()
        if topk:
            self._next[offsets] += values
        else:
            self._next[offsets] = values
        return Reply(
            incarnation=self._incarnation,
            shard=self.index,
            number=header.reply_number,
            version=header.version,
            topk=topk,
            image=header.image,
            whole=whole and not topk,
            applied=True,
            digest=digest(self._next),
            offsets=offsets if topk else _NO_OFFSETS,
            values=values if topk else _NO_VALUES,
        )

    def apply(self, reply: Reply) -> None:
        """Make the reply that was last asked for the replica."""
        self.values, self.version = self._next, reply.version
        self._number, self._image = reply.number, reply.image
