"""What a step costs, as the simulation takes it. All of it is measured; see :mod:`benchmarks.scale.calibration`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from benchmarks.scale.fits import Curve, Line

SCAN_FROM = 1 / 256
"""Entries over elements from which the server marks and scans a bitmap for a union: psservice.model.changelog."""

AMONG_CHANGED = 1 / 40
"""Changed entries over elements up to which a top-k reply looks among them alone (psservice.replies.topk)."""

VALUE_BYTES = 4
"""fp32."""


NOTHING = Line()
NO_BITS = Curve((1e-6, 1.0), (0.0, 0.0))
ALL_NEW = Curve((1e-6, 1.0), (1.0, 1.0))


@dataclass(frozen=True)
class Costs:
    """Seconds of one core, and bytes. Units of a line: entries, but where something else is said.

    Attributes:
        decode: to parse, decode, check and merge a push.
        apply: of the apply thread, for a push.
        union_sort: to find what has changed by sorting; entries of all pushes that a pull covers.
        union_mark: likewise by marking, for each of these entries; ``union_scan`` comes on top.
        union_scan: elements of the shard.
        gather: to read the values of a reply; entries of the reply.
        copy: to copy everything; elements of the shard.
        encode: to write a sparse reply.
        encode_dense: to write a dense reply; elements.
        select_all: to select a top-k reply among all; elements of the shard.
        select_changed: among what has changed; entries of all pushes that it covers.
        push_call: of the server, gRPC's part of a push; bytes.
        pull_call: likewise of a pull.
        client_push: of a client that replays a push; bytes.
        client_pull: of one that takes a reply and does not decode it; bytes.
        idle: seconds of a push and its answer in which nobody computes: threads are woken.
        renewal: of the server, to renew a lease.
        worker_select: of a real worker, to accumulate and select; elements of the model.
        worker_encode: likewise to write a push.
        worker_install: likewise to decode a reply and write it into the model.
        index_bits: of an entry, by density.
        novelty: ``a``, by density: ``n`` pushes of real training change what ``n^a`` at random places would.
        push_frame: bytes of a push beside indices and values, for a shard.
        pull_frame: likewise of a reply.
        serial: share of what grows of a work that no other thread of the process can do meanwhile, for ``decode``,
            ``encode``, ``union`` and ``select``; what is fixed is Python, and nobody else's turn.
        crowding: how much more CPU time a work takes for each further one at once, as a share, up to as many as there
            are cores.
        handover: of the server, to pass the interpreter's lock on to a work that waits for it.
        server_bytes: resident set of a server without a model.
        notes: how well the lines fit, by name: the largest relative distance.
    """

    decode: Line = NOTHING
    apply: Line = NOTHING
    union_sort: Line = NOTHING
    union_mark: Line = NOTHING
    union_scan: Line = NOTHING
    gather: Line = NOTHING
    copy: Line = NOTHING
    encode: Line = NOTHING
    encode_dense: Line = NOTHING
    select_all: Line = NOTHING
    select_changed: Line = NOTHING
    push_call: Line = NOTHING
    pull_call: Line = NOTHING
    client_push: Line = NOTHING
    client_pull: Line = NOTHING
    idle: float = 0.0
    renewal: float = 0.0
    worker_select: Line = NOTHING
    worker_encode: Line = NOTHING
    worker_install: Line = NOTHING
    index_bits: Curve = NO_BITS
    novelty: Curve = ALL_NEW
    push_frame: float = 0.0
    pull_frame: float = 0.0
    serial: Mapping[str, float] = field(default_factory=dict)
    crowding: float = 0.0
    handover: float = 0.0
    server_bytes: float = 0.0
    notes: Mapping[str, float] = field(default_factory=dict)

    def split(self, work: Line, units: float, kind: str) -> tuple[float, float]:
        """Return the seconds of a work with the interpreter's lock, and without."""
        growing = work.each * units
        share = self.serial.get(kind, 0.0)
        return work.fixed + share * growing, (1 - share) * growing

    def sparse_bytes(self, entries: float, density: float) -> float:
        """Return index and value bytes of a message stream; a dense one has no indices."""
        return entries * (VALUE_BYTES + (self.index_bits(density) / 8 if density < 1 else 0.0))

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def free(self) -> "Costs":
        """Return the same bytes where nothing costs time: what networks allow, however fast the hosts are."""
        nothing = {name: Line() for name, value in self.__dict__.items() if isinstance(value, Line)}
        return replace(self, **nothing, idle=0.0, renewal=0.0, handover=0.0)  # type: ignore[arg-type]


def from_plain(plain: Mapping[str, Any]) -> Costs:
    """Read what :meth:`Costs.plain` has written, also after JSON."""
    values: dict[str, Any] = dict(plain)
    for name, value in plain.items():
        if isinstance(value, Mapping) and set(value) == {"fixed", "each"}:
            values[name] = Line(**value)
    for name in ("index_bits", "novelty"):
        values[name] = Curve(*(tuple(plain[name][part]) for part in ("densities", "values")))
    return Costs(**values)
