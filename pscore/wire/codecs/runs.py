"""Runs of neighbours: where each begins and how many entries there are up to its end, both as RICE writes offsets.

For supports that consist of whole rows, as the gradient of an embedding: a row costs what one entry costs elsewhere.
docs/reference/wire-format.md has the bytes. A reader takes constant time a run and an entry.
"""

import numpy as np
from numpy.typing import NDArray

from pscore.jit import COMPILED_FROM
from pscore.wire.codecs import index_loops as loops
from pscore.wire.codecs.format import IndexFormat, Offsets
from pscore.wire.codecs.rice import RICE
from pscore.wire.errors import ErrorCode, Rejected

_HEADER_BYTES = 8


def count_runs(offsets: Offsets) -> int:
    """Return how many runs of neighbours rising offsets consist of, of which there is one at least."""
    return 1 + int(np.count_nonzero(_last_of_runs(offsets)))


def _last_of_runs(offsets: Offsets) -> NDArray[np.bool_]:
    """Mark the entries, but for the very last, behind which a run ends. By numpy: few entries await no compiler."""
    ends: NDArray[np.bool_] = offsets[1:] - offsets[:-1] != 1
    return ends


def _write(offsets: Offsets, length: int, base: int) -> bytes:
    last = np.flatnonzero(_last_of_runs(offsets))
    ends = np.append(last, offsets.size - 1)[: offsets.size]  # without an entry there is no run
    starts: Offsets = offsets[np.append(0, last + 1)[: offsets.size]]
    written: bytes = RICE.write(starts, length, base)
    sizes = starts.size.to_bytes(4, "little") + len(written).to_bytes(4, "little")
    return sizes + written + RICE.write(ends, offsets.size, 0)


def _read(data: bytes, count: int, length: int, base: int) -> Offsets:
    if len(data) < _HEADER_BYTES:
        raise Rejected(ErrorCode.BAD_CHUNK, f"{len(data)} index bytes for the sizes of runs")
    runs, size = int.from_bytes(data[:4], "little"), int.from_bytes(data[4:_HEADER_BYTES], "little")
    if runs > count:
        raise Rejected(ErrorCode.BAD_CHUNK, f"{runs} runs of {count} entries")
    if size > len(data) - _HEADER_BYTES:
        there = len(data) - _HEADER_BYTES
        raise Rejected(ErrorCode.BAD_CHUNK, f"{size} bytes of places of runs declared, {there} are there")
    starts = RICE.read(data[_HEADER_BYTES : _HEADER_BYTES + size], runs, length, base)
    ends = RICE.read(data[_HEADER_BYTES + size :], runs, count, 0)
    entries = int(ends[-1]) + 1 if runs else 0
    if entries != count:
        raise Rejected(ErrorCode.BAD_CHUNK, f"runs of {entries} entries, the chunk says {count}")
    offsets = np.empty(count, np.int64)
    if not loops.read_runs.on(count)(starts, ends, offsets):
        raise Rejected(ErrorCode.BAD_CHUNK, "runs overlap")
    return offsets


def _bits(count: int, length: int, runs: int) -> float:
    return 8 * _HEADER_BYTES + RICE.bits(runs, length, runs) + RICE.bits(runs, count, runs)


def _nanoseconds(count: int, length: int, runs: int) -> float:
    if count < COMPILED_FROM:
        return 4e5 + 70.0 * (count + 2 * runs)
    return 1.6e4 + 1.5 * count + 12.0 * runs


RUNS = IndexFormat("runs", _write, _read, _bits, _nanoseconds)
