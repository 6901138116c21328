"""What a pull costs and weighs, by how many pushes it covers; and which way of answering ``auto`` would choose."""

from dataclasses import dataclass
from typing import Protocol

from benchmarks.scale.costs import AMONG_CHANGED, SCAN_FROM, VALUE_BYTES, Costs

EXACT_LIMIT = 0.10
"""Density of change above which ``auto`` leaves exact replies (``--exact-limit``)."""

LEDGER_MULTIPLE = 1.0
"""Entries that the server remembers, as a multiple of the elements (``--ledger-multiple``)."""

CALM_PULLS = 64
"""Pulls with little change after which ``auto`` goes back (psservice.replies.reply_mode)."""

_SPARSE_CHARGE, _DENSE_CHARGE = 12, 4  # bytes that the server charges an entry of a reply with


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of one shard.

    Attributes:
        size: bytes.
        entries: in it.
        build: seconds beside the apply thread, with the interpreter's lock and without.
        encode: seconds, likewise.
        charge: bytes that it occupies in the server.
        topk: whether it is one.
    """

    size: float
    entries: float
    build: tuple[float, float]
    encode: tuple[float, float]
    charge: float
    topk: bool = False


class Place(Protocol):
    in_topk: bool
    calm: int


class Replies:
    """The answers of one shard.

    Args:
        costs: of its works.
        elements: of the shard.
        density: of pushes and of top-k replies.
        down_mode: ``auto``, ``exact`` or ``topk``.
        random: whether pushes name random places, as replayed ones do, and not those of training.
    """

    def __init__(self, costs: Costs, elements: float, density: float, down_mode: str, *, random: bool = True) -> None:
        self._novelty = 1.0 if random else costs.novelty(density)
        self._costs, self._elements, self._density, self._mode = costs, elements, density, down_mode
        self._known: dict[tuple[int, bool], Reply] = {}

    def after(self, window: int, place: Place) -> Reply:
        """Return the answer to a worker, that covers so many pushes."""
        return self._reply(window, self._chooses_topk(window, place))

    def exact(self, window: int) -> Reply:
        """Return the exact reply that covers so many pushes."""
        return self._reply(window, topk=False)

    def union(self, window: int) -> float:
        """Return the density of what pushes have changed together."""
        return 1.0 - float((1 - self._density) ** (window**self._novelty))

    def _chooses_topk(self, window: int, place: Place) -> bool:
        """Follow psservice.replies.reply_mode; the reply that opens an image is taken for one that follows."""
        if self._mode != "auto":
            return self._mode == "topk"
        changed = window * self._density
        if not place.in_topk:
            forgotten = changed > LEDGER_MULTIPLE  # and so everything, for the rule
            place.calm, place.in_topk = 0, forgotten or self.union(window) > EXACT_LIMIT
        elif changed <= LEDGER_MULTIPLE:
            place.calm = place.calm + 1 if changed < EXACT_LIMIT / 2 else 0
            place.in_topk = place.calm < CALM_PULLS
        return place.in_topk

    def _reply(self, window: int, topk: bool) -> Reply:
        if (window, topk) not in self._known:
            self._known[window, topk] = self._topk(window) if topk else self._exact(window)
        return self._known[window, topk]

    def _exact(self, window: int) -> Reply:
        costs, elements = self._costs, self._elements
        covered = window * self._density * elements
        if covered > LEDGER_MULTIPLE * elements:
            size = costs.pull_frame + VALUE_BYTES * elements
            encode = costs.split(costs.encode_dense, elements, "encode")
            copied = costs.split(costs.copy, elements, "union")
            return Reply(size, elements, copied, encode, _DENSE_CHARGE * elements)
        union = self.union(window)
        entries = union * elements
        united = self._uniting(covered) if window > 1 else (0.0, 0.0)
        read = costs.split(costs.gather, entries, "union")
        build = united[0] + read[0], united[1] + read[1]
        size = costs.pull_frame + costs.sparse_bytes(entries, union)
        encode = costs.split(costs.encode, entries, "encode")
        return Reply(size, entries, build, encode, _SPARSE_CHARGE * entries)

    def _uniting(self, covered: float) -> tuple[float, float]:
        costs, elements = self._costs, self._elements
        if covered < SCAN_FROM * elements:
            return costs.split(costs.union_sort, covered, "union")
        marked = costs.split(costs.union_mark, covered, "union")
        scanned = costs.split(costs.union_scan, elements, "union")
        return marked[0] + scanned[0], marked[1] + scanned[1]

    def _topk(self, window: int) -> Reply:
        costs, elements = self._costs, self._elements
        covered, entries = window * self._density * elements, self._density * elements
        if covered <= AMONG_CHANGED * elements:
            build = costs.split(costs.select_changed, covered, "select")
        else:
            build = costs.split(costs.select_all, elements, "select")
        size = costs.pull_frame + costs.sparse_bytes(entries, self._density)
        encode = costs.split(costs.encode, entries, "encode")
        return Reply(size, entries, build, encode, _SPARSE_CHARGE * entries, topk=True)
