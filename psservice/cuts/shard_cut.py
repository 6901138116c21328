"""One shard's part of a cut: its values at one version, their digest, and the replies that bring readers there."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from pscore.model.buffers import pack
from pscore.model.layout import Span
from pscore.model.modelfile import StateDict
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.frames import WireForm
from psservice.cuts.shadow import Shadow
from psservice.model.changelog import ALMOST_ALL, most_changed, union
from psservice.model.shared_results import SharedResults
from psservice.replies.exact_reply import SPARSE_ENTRY_BYTES, ModelValues, Reserve
from psservice.replies.shared_reply import DenseMessages, ReplyMessages, SharedReply

_BUFFERS_DIGEST_BYTES = 16


class Held(NamedTuple):
    """What a reader has of a part of a shard: the values of a version; ``None``: nothing."""

    part: Span
    version: int | None


class ShardCut:
    """A shard's values in a cut; from any thread.

    Attributes:
        number: names the cut at all shards.
        version, generation: of the shard's values; ``digest`` is theirs.
        buffers: the model's buffers, end to end; ``buffers_digest`` is theirs; both empty if there are none.
        made: when, by the clock of the shard's environment.
    """

    def __init__(self, number: int, shadow: Shadow, buffers: StateDict, made: float) -> None:
        self.number, self.model, self.made = number, shadow.model, made
        self.version, self.digest, self.generation = shadow.version, shadow.digest, shadow.model.generation
        self.buffers = pack(buffers[spec.name] for spec in self.model.layout.buffers) if buffers else b""
        digest = hashlib.blake2b(self.buffers, digest_size=_BUFFERS_DIGEST_BYTES).digest()
        self.buffers_digest = digest if self.buffers else b""
        self._values = shadow.values()
        self._replies = SharedResults(4 * self.model.span.length)

    def reply(self, held: Sequence[Held], form: WireForm, chunk_bytes: int, reserve: Reserve) -> SharedReply:
        """Return what a reader lacks; readers that have the same share it, and the one that makes it calls ``reserve``.

        ``held`` are parts of the shard, one behind the other. Raises :class:`Rejected`: ``BAD_REQUEST``,
        ``VERSION_IN_FUTURE``, ``BUSY``, ``NON_FINITE``.
        """
        span, end = self.model.span, self.model.span.start
        for part, version in held:
            if part.start != end or not end < part.end <= span.end:
                raise Rejected(ErrorCode.BAD_REQUEST, f"held parts must follow one another up to {span.end}")
            if version is not None and version > self.version:
                raise Rejected(ErrorCode.VERSION_IN_FUTURE, f"the reader has version {version}, the cut {self.version}")
            end = part.end
        if end != span.end:
            raise Rejected(ErrorCode.BAD_REQUEST, f"held parts end at {end}, and the shard at {span.end}")
        return self._replies.get((tuple(held), form), 0, lambda: self._make(held, form, chunk_bytes, reserve))

    def _make(self, held: Sequence[Held], form: WireForm, chunk_bytes: int, reserve: Reserve) -> SharedReply:
        model, values = self.model, self._values
        lacking = [(part, self._changed(version)) for part, version in held]
        if all(changed is not None for _, changed in lacking):
            reserve(SPARSE_ENTRY_BYTES * sum(changed.numel() for _, changed in lacking if changed is not None))
            segments = [each for part, changed in lacking for each in _segments(values, part, changed)]
            sent = [piece for each in segments for piece in model.as_sent(each)]
            nbytes = 12 * sum(each.entries for each in segments)
            messages = ReplyMessages(sent, form, chunk_bytes, 2 * nbytes)
            return SharedReply(0, self.version, sum(each.entries for each in sent), False, nbytes, messages)

        def read() -> Iterator[SparseSlice]:  # refers to the values, and not to the cut, which refers to the reply
            for part, changed in lacking:
                for segment in _segments(values, part, changed):
                    yield from model.as_sent(segment)

        dense = DenseMessages(read, form, chunk_bytes)
        return SharedReply(0, self.version, model.span.length, True, 0, dense)

    def _changed(self, version: int | None) -> torch.Tensor | None:
        """Return the offsets at which the cut may differ from a version (int64, ascending); ``None`` for all."""
        if version is None:
            return None
        size, is_same = self.model.span.length, version == self.version and self.model.versions_name_values
        changes = [] if is_same else self.model.changes_between(version, self.version)
        most = most_changed(changes, size)
        if changes is None or most is None:
            return None
        found = union(changes, size)
        if found is None or found.numel() >= ALMOST_ALL * size:
            return None
        return found.to(self.model.theta.device).long()


def _segments(values: ModelValues, part: Span, changed: torch.Tensor | None) -> Iterator[SparseSlice]:
    """Yield a part's values on the host; those at the changed offsets of the shard, or all."""
    if changed is None:
        for piece in values.parts(part):
            yield piece.cpu()
        return
    inside = SparseSlice(values.model.span, changed, changed).clip(part)
    if inside is not None:
        assert inside.offsets is not None
        yield SparseSlice(part, inside.offsets.cpu(), values.values.gather(inside.values).cpu())
