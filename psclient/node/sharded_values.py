"""The values of a model that ranks have in parts, as the leader's engine reads and writes them."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from isal.isal_zlib import crc32

from psclient.model.replica import DIGEST_BLOCK
from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.dense import bytes_of, cut

if TYPE_CHECKING:
    from psclient.node.sharded import Sharded


class ShardedValues:
    """The values of a model that ranks have in parts; see :class:`~psclient.engine.home.Values`."""

    def __init__(self, ranks: "Sharded", layout: ModelLayout) -> None:
        self.layout = layout
        self._ranks = ranks

    def loaded(self) -> str | None:
        """Return the name of a parameter that a script has written to, as the ranks have said when the call began."""
        return self._name(self._ranks.loaded)

    def drifted(self) -> str | None:
        """Return the name of a parameter that was written to without a trace, likewise."""
        name, self._ranks.drifted = self._name(self._ranks.drifted), []
        return name

    def _name(self, positions: Sequence[int]) -> str | None:
        found = [position for position in positions if position >= 0]
        return self.layout.parameters[min(found)].name if found else None

    def written(self) -> list[int]:
        """Return the positions of the parameters that scripts have written to in place."""
        return self._ranks.written()

    def accept(self) -> None:
        """Note the current values as the known ones, on all ranks."""
        self._ranks.loaded = []
        self._ranks.tell("accept")
        self._ranks.rank.values.accept()

    def digest(self) -> bytes:
        """Return the digest of :meth:`Replica.digest`; blocks that no rank has whole are read here."""
        known, digest = self._ranks.checksums(), hashlib.sha256()
        for position, spec in enumerate(self.layout.parameters):
            if not spec.numel:
                digest.update(crc32(b"").to_bytes(4, "little"))
            for number, part in enumerate(cut(self.layout.span(position), DIGEST_BLOCK)):
                checksum = known.get((position, number))
                if checksum is None:
                    [segment] = self._ranks.read(part)
                    checksum = crc32(bytes_of(segment.values.to(spec.dtype)))
                digest.update(checksum.to_bytes(4, "little"))
        return digest.digest()

    def not_finite(self) -> str | None:
        """Return the name of the first parameter with a value that is not finite."""
        return self._ranks.not_finite()

    def sample(self) -> None:
        """Have each rank remember the bits of a random part of its blocks."""
        self._ranks.tell("sample")
        self._ranks.rank.values.sample()

    def read(self, span: Span) -> Iterator[SparseSlice]:
        """Yield the values of a span, a parameter at a time, from the ranks that have them."""
        return self._ranks.read(span)

    def write(self, segments: Sequence[SparseSlice]) -> None:
        """Have each rank write the values that lie in its blocks."""
        for piece in self._ranks.spread("write", segments, adds=False):
            self._ranks.rank.write([piece], adds=False)

    def add(self, segments: Sequence[SparseSlice]) -> None:
        """Have each rank add the differences that lie in its blocks."""
        for piece in self._ranks.spread("write", segments, adds=True):
            self._ranks.rank.write([piece], adds=True)

    def open_fp32(self, span: Span) -> None:
        """Have each rank keep fp32 copies of its half-precision blocks in a span."""
        self._ranks.tell("open fp32", span=[span.start, span.end])
        self._ranks.rank.open_fp32(span)
