"""Gaps in Golomb-Rice codes, with a parameter per block and an escape: near the entropy of a random support.

docs/reference/wire-format.md has the bytes. Quotients, low bits and escaped gaps stand in sections of their own.
There is one way to write given gaps with given parameters. An entry costs at most 49 bits. Reading one takes
a constant number of steps.
"""

import math

import numpy as np

from pscore.jit import COMPILED_FROM
from pscore.wire.codecs import index_loops as loops
from pscore.wire.codecs.format import IndexFormat, Offsets
from pscore.wire.codecs.index_loops import BLOCK, ESCAPE, MAX_PARAMETER
from pscore.wire.errors import ErrorCode, Rejected


def _write(offsets: Offsets, length: int, base: int) -> bytes:
    data: bytes = loops.write_rice(offsets, base).tobytes()
    return data


def _read(data: bytes, count: int, length: int, base: int) -> Offsets:
    blocks = -(-count // BLOCK)
    if len(data) < 4 + blocks:
        raise Rejected(ErrorCode.BAD_CHUNK, f"{len(data)} index bytes for {blocks} blocks of Rice codes")
    size, rest = int.from_bytes(data[:4], "little"), len(data) - 4 - blocks
    if size > rest:
        raise Rejected(ErrorCode.BAD_CHUNK, f"{size} bytes of quotients declared, {rest} are there")
    offsets = np.empty(count if count <= 8 * size else 0, np.int64)  # an entry has a bit of them
    wrong, first, second = loops.read_rice(np.frombuffer(data, np.uint8), size, count, base, offsets)
    if wrong:
        says = {
            loops.BAD_PARAMETER: f"a Rice parameter above {MAX_PARAMETER}",
            loops.BAD_COUNT: f"{first} quotients in {size} bytes for {count} entries",
            loops.BAD_QUOTIENT: f"a quotient above {ESCAPE}",
            loops.BAD_SIZE: f"{rest - size} bytes for {first} low bits and {second} escaped gaps",
            loops.BAD_PADDING: "bits behind the last entry are not zero",
            loops.BAD_ESCAPE: "an escaped gap is short enough not to be escaped",
        }
        raise Rejected(ErrorCode.BAD_CHUNK, says[wrong])
    return offsets


def _bits(count: int, length: int, runs: int) -> float:
    absent = 1 - count / max(1, length)
    if not absent:
        each = 1.0
    else:
        # The quotient of a geometric gap is geometric too; the best parameter makes its mean about 1.
        ideal = max(0, math.ceil(math.log2(math.log(0.618) / math.log(absent))))
        each = min(b + 1 / (1 - absent ** (1 << b)) for b in (max(0, ideal - 1), ideal, ideal + 1))
    return each * count + 8 * (4 + -(-count // BLOCK))


def _nanoseconds(count: int, length: int, runs: int) -> float:
    # For few entries high enough for another codec to be chosen, so that a small model never waits for the compiler.
    return 8e3 + 5.5 * count if count >= COMPILED_FROM else 2e5 + 70.0 * count


RICE = IndexFormat("rice", _write, _read, _bits, _nanoseconds)
