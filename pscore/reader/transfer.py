"""The transfer of one shard's part of a cut: all values, or changes; one that was cut off goes on where it was."""

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pscore.model.buffers import packed_bytes
from pscore.model.digest import DIGEST_BYTES
from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.reader.cut import Cut, ShardVersion
from pscore.wire import frames
from pscore.wire.codecs.names import READABLE_INDEX_CODECS
from pscore.wire.dense import split_values
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.messages import type_to_message
from pscore.wire.v1 import parameter_server_pb2 as pb


def digest_of_buffers(packed: bytes) -> bytes:
    """Return the digest of packed buffers, as a cut has it."""
    return hashlib.blake2b(packed, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class FetchedShard:
    """The fetched part of one shard: entries to write over the values of ``base``; all of them if that is ``None``.

    ``buffers`` are packed; empty if none came. ``received_bytes`` came within ``seconds`` behind the header.
    """

    version: ShardVersion
    base: ShardVersion | None
    changes: list[SparseSlice]
    buffers: bytes
    received_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Partial:
    """The beginning of a transfer that was cut off: entries before ``end``."""

    version: ShardVersion
    base: ShardVersion | None
    end: int
    segments: list[SparseSlice]
    buffers: bytes


class CutTransfer:
    """Asks for one shard's part of cuts, and reads the answers; of one that breaks off, the beginning is kept.

    Args:
        index: the shard's number.
        layout: as the reader has it.
        span: the shard's range.
        dtype: in which the reader has the run's fp32 parameters; ``None``: as the run.
        read: returns what the reader holds at the places of entries, fp32 on the host, or ``None``; from any thread.
    """

    def __init__(
        self,
        index: int,
        layout: ModelLayout,
        span: Span,
        dtype: torch.dtype | None = None,
        read: Callable[[SparseSlice], SparseSlice | None] = lambda entries: None,
    ) -> None:
        self.index, self.span, self.layout = index, span, layout
        self._dtype, self._read_held = dtype, read
        self._partial: _Partial | None = None

    def asked(self, cut: Cut, held: Cut | None, buffers: bytes, bytes_per_second: float | None = None) -> "Attempt":
        """Return an attempt to get the difference from the held cut, and packed buffers, to another cut."""
        version, base = cut.shards[self.index], None
        if held is not None and len(held.shards) == len(cut.shards):
            base = held.shards[self.index]
            base = base if base.generation == version.generation and base.version <= version.version else None
        wants_buffers = cut.buffers_digest if self.index == 0 else b""
        known = digest_of_buffers(buffers) if wants_buffers and buffers else b""
        before = self._usable(version, base)
        request = self._request(version, base, before, known)
        request.link_bytes_per_second = bytes_per_second or 0.0
        request.cut_buffers_digest = wants_buffers
        return Attempt(self, request, version, base, before)

    def end(self) -> None:
        """Keep no beginning any more: all has come."""
        self._partial = None

    def _usable(self, version: ShardVersion, base: ShardVersion | None) -> _Partial | None:
        """Return the beginning that this transfer can go on from."""
        partial = self._partial
        if partial is None or partial.version.generation != version.generation or partial.base != base:
            return None
        is_same = partial.version == version
        # The beginning of everything is worth more than that of a difference, which is fetched anew.
        return partial if is_same or (base is None and partial.version.version <= version.version) else None

    def _request(
        self, version: ShardVersion, base: ShardVersion | None, before: _Partial | None, known: bytes
    ) -> pb.ReadCutRequest:
        held = []
        if before is not None:
            held.append(pb.HeldPart(end=before.end, has_version=True, version=before.version.version))
        if base is None:
            held.append(pb.HeldPart(end=self.span.end))
        else:
            held.append(pb.HeldPart(end=self.span.end, has_version=True, version=base.version))
        return pb.ReadCutRequest(
            version=pb.ShardVersion(**version._asdict()),
            held=held,
            buffers_digest=known,
            index_codecs=READABLE_INDEX_CODECS,
            reader_type=type_to_message(self._dtype),
            residues=self._takes_residues(base, before),
        )

    def _takes_residues(self, base: ShardVersion | None, before: _Partial | None) -> bool:
        """Tell whether all of a version is held in words of 16 bits, and can be read."""
        if base is None or before is not None:
            return False
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        narrow = [run for dtype, run in self.layout.dtype_runs(self.span) if dtype.itemsize == 2]
        return bool(narrow) and self._read_held(SparseSlice(narrow[0], nothing, nothing.float())) is not None

    def _own(self, span: Span, offsets: NDArray[np.int64] | None) -> torch.Tensor:
        """Return what is held at offsets of a span, in its 16-bit type; raises :class:`Rejected` if it has none."""
        types = {dtype for dtype, _ in self.layout.dtype_runs(span)}
        if len(types) != 1 or next(iter(types)).itemsize != 2:
            raise Rejected(ErrorCode.BAD_CHUNK, f"residues for [{span.start}, {span.end}), which has other types")
        places = None if offsets is None else torch.from_numpy(offsets)
        count = span.length if places is None else places.numel()
        held = self._read_held(SparseSlice(span, places, torch.empty(count, dtype=torch.float32, device="cpu")))
        if held is None:
            raise Rejected(ErrorCode.BAD_CHUNK, "residues, which this reader cannot complete")
        return held.values.to(types.pop())

    def read(self, attempt: "Attempt", messages: Iterator[bytes], progressed: Callable[[], None]) -> FetchedShard:
        """See :meth:`Attempt.read`."""
        version, base, before = attempt.version, attempt.base, attempt.before
        own = self._own if attempt.request.residues else None
        reader, buffers = frames.ChunkReader(self.span, own=own, dtype=self.layout.value_dtype), b""
        pieces: frames.BytesReader | None = None
        received, began = 0, 0.0
        for data in messages:
            received += len(data) + frames.FRAMING_BYTES
            rest, values = split_values(data, several=True)
            response = pb.ReadCutResponse.FromString(rest)
            if response.HasField("header"):
                if pieces is not None or response.header.version != version.version:
                    raise Rejected(ErrorCode.BAD_REQUEST, "a second header, or that of another version")
                most, nbytes = packed_bytes(self.layout.buffers), response.header.buffer_bytes
                pieces, began = frames.BytesReader(nbytes, most if nbytes else 0), time.perf_counter()
                received = 0
            if pieces is None:
                raise Rejected(ErrorCode.BAD_REQUEST, "a reply without its header")
            if response.HasField("buffers"):
                pieces.read(response.buffers)
            for number, chunk in enumerate(response.chunks):
                reader.read(chunk, *values[number : number + 1])
            if response.HasField("so_far"):
                reader.checksum.verify(response.so_far)
                progressed()
                if before is None or reader.position > before.end:
                    segments = _joined(before, [*reader.segments])
                    self._partial = _Partial(version, base, reader.position, segments, pieces.finish())
            if response.HasField("commit"):
                reader.checksum.verify(response.commit)
                buffers = pieces.finish()
                break
        seconds = time.perf_counter() - began
        changes = _joined(before, reader.segments)
        if base is None:
            self._require_all(changes)
        whole_buffers = buffers or (before.buffers if before else b"")
        return FetchedShard(version, base, changes, whole_buffers, received, seconds)

    def _require_all(self, changes: list[SparseSlice]) -> None:
        end = self.span.start
        for segment in changes:
            if segment.offsets is None and segment.span.start == end:
                end = segment.span.end
        if end != self.span.end:
            raise Rejected(
                ErrorCode.BAD_COMMIT, f"a reply of everything ends at {end}, and the shard at {self.span.end}"
            )


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a transfer: ``request`` is sent, and :meth:`read` reads the answer."""

    transfer: CutTransfer
    request: pb.ReadCutRequest
    version: ShardVersion
    base: ShardVersion | None
    before: "_Partial | None"

    def read(self, messages: Iterator[bytes], progressed: Callable[[], None] = lambda: None) -> FetchedShard:
        """Read the answer; ``progressed`` is called after each part that was checked.

        Raises :class:`Rejected` if the answer breaks the form, or does not check.
        """
        return self.transfer.read(self, messages, progressed)


def _joined(before: _Partial | None, segments: list[SparseSlice]) -> list[SparseSlice]:
    """Return the entries of a transfer with those of its beginning, which newer entries overwrite."""
    if before is None:
        return segments
    begun = [*before.segments]
    for segment in segments:
        part = segment.clip(Span(0, before.end))
        if part is not None:
            _overwrite(begun, part)
    rest = [segment.clip(Span(before.end, segment.span.end)) for segment in segments if segment.span.end > before.end]
    return [*begun, *(segment for segment in rest if segment is not None)]


def _overwrite(begun: list[SparseSlice], entries: SparseSlice) -> None:
    """Replace the dense segments that entries lie in by others with the values of these."""
    for number, target in enumerate(begun):
        part = entries.clip(target.span)
        if part is None:
            continue
        first, values = part.span.start - target.span.start, target.values.clone()  # a message may own the memory
        where = slice(first, first + part.span.length) if part.offsets is None else part.offsets + first
        values[where] = part.values
        begun[number] = SparseSlice(target.span, None, values)
