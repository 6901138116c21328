"""One shard's part of a cut: its values at one version, their digests, and the replies that bring readers there."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from pscore.model.buffers import pack
from pscore.model.layout import Span
from pscore.model.modelfile import StateDict
from pscore.model.sparse_slice import SparseSlice
from pscore.reader.transfer import digest_of_buffers
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.frames import WireForm
from psservice.cuts.cut_view import Changes, CutView, Find, values_of
from psservice.cuts.shadow import ReaderType, Shadow
from psservice.model.parameters import rounded_slices
from psservice.model.shared_results import SharedResults
from psservice.replies.exact_reply import ModelValues, Reserve
from psservice.replies.shared_reply import DenseMessages, ReplyMessages, Residues, Segment, SharedReply


class Held(NamedTuple):
    """What a reader has of a part of a shard: the values of a version; ``None``: nothing."""

    part: Span
    version: int | None


class ReaderForm(NamedTuple):
    """How a reader wants its replies.

    Attributes:
        wire: how they are written.
        dtype: in which the reader has the run's fp32 parameters.
        residues: whether the reader completes residues from what it has.
    """

    wire: WireForm
    dtype: ReaderType = None
    residues: bool = False


class ShardCut:
    """A shard's values in a cut; from any thread.

    Attributes:
        number: names the cut at all shards.
        version, generation: of the shard's values.
        publication: that they are; empty if the run is no feed.
        values: at this version.
        views: by the readers' data type, in the order of ``types``.
        buffers: the model's buffers, end to end; ``buffers_digest`` is theirs; both empty if there are none.
        made: when, by the clock of the shard's environment.
    """

    def __init__(
        self,
        number: int,
        shadow: Shadow,
        publication: str,
        buffers: StateDict,
        made: float,
        types: Sequence[ReaderType] = (None,),
    ) -> None:
        self.number, self.model, self.made = number, shadow.model, made
        self.version, self.generation = shadow.version, shadow.model.generation
        self.publication = publication
        views = {dtype: shadow.views[dtype] for dtype in types}
        self.buffers = pack(buffers[spec.name] for spec in self.model.layout.buffers) if buffers else b""
        self.buffers_digest = digest_of_buffers(self.buffers) if self.buffers else b""
        self.values = values = shadow.values()
        self.views = {
            dtype: CutView(values, each.layout, each.digest, each.stamps, each.tracks) for dtype, each in views.items()
        }
        self._replies = SharedResults(4 * self.model.span.length)

    def reply(
        self,
        held: Sequence[Held],
        form: ReaderForm,
        chunk_bytes: int,
        reserve: Reserve,
        find: Find = lambda version: None,
    ) -> SharedReply:
        """Return what a reader lacks; readers that have the same share it, and the one that makes it calls ``reserve``.

        ``held`` are parts of the shard, one behind the other; ``find`` returns the values of an older version, if they
        are still known. Raises :class:`Rejected`: ``BAD_REQUEST``, ``VERSION_IN_FUTURE``, ``BUSY``, ``NON_FINITE``.
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
        return self._replies.get((tuple(held), form), 0, lambda: self._make(held, form, chunk_bytes, reserve, find))

    def _make(
        self, held: Sequence[Held], form: ReaderForm, chunk_bytes: int, reserve: Reserve, find: Find
    ) -> SharedReply:
        view = self.views[form.dtype]
        found = {version: view.since(version, reserve, find) for version in {each.version for each in held}}
        lacking = [(*each, found[each.version]) for each in held]
        if all(changes is not None for _, _, changes in lacking):
            sent = [piece for each in lacking for piece in _pieces(view, *each, form)]
            entries = sum(each.entries.entries if isinstance(each, Residues) else each.entries for each in sent)
            messages = ReplyMessages(sent, form.wire, chunk_bytes, 24 * entries)
            return SharedReply(0, self.version, entries, False, 12 * entries, messages)

        def read() -> Iterator[Segment]:  # refers to the values, and not to the cut, which refers to the reply
            for each in lacking:
                yield from _pieces(view, *each, form)

        nbytes = sum(changes.nbytes for changes in found.values() if changes is not None)
        dense = DenseMessages(read, form.wire, chunk_bytes, nbytes)
        return SharedReply(0, self.version, self.model.span.length, True, nbytes, dense)


def _segments(values: ModelValues, part: Span, changes: Changes | None) -> Iterator[SparseSlice]:
    """Yield a part's values on the host; those that have changed, or all."""
    if changes is None:
        for piece in values.parts(part):
            yield piece.cpu()
        return
    there = _within(changes, part, values.model.span)
    if there.start < there.stop:
        offsets = torch.from_numpy(changes.offsets[there])
        yield SparseSlice(part, offsets - (part.start - values.model.span.start), values_of(values, offsets))


def _within(changes: Changes, part: Span, span: Span) -> slice:
    return slice(*np.searchsorted(changes.offsets, (part.start - span.start, part.end - span.start)).tolist())


def _pieces(
    view: CutView, part: Span, version: int | None, changes: Changes | None, form: ReaderForm
) -> Iterator[SparseSlice | Residues]:
    """Yield the segments of a part: residues of 16-bit words if the reader takes them, else values."""
    first = 0 if changes is None else _within(changes, part, view.values.model.span).start
    for segment in _segments(view.values, part, changes):
        for piece in rounded_slices(view.layout, segment):
            last = first + piece.entries
            if version is None or not form.residues or piece.values.dtype.itemsize != 2:
                yield piece
            elif changes is None:
                yield Residues(piece, view.distances(version, piece.span))
            else:
                yield Residues(piece, changes.distances[first:last])
            first = last
