"""Chunks that are nearly right: good ones and the corpus, changed in a few places, by chance that can be repeated."""

import random
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import torch
from google.protobuf import text_format

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire import frames
from pscore.wire.codecs.format import MAX_ENTRIES
from pscore.wire.codecs.index import INDEX_FORMATS
from pscore.wire.codecs.values import VALUE_FORMATS
from pscore.wire.errors import Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.hostile.corpus_files import corpus
from tests.hostile.oracle import decode_within_memory

MutateBytes = Callable[[bytes, random.Random], bytes]

_COUNTS = (1, 2, 7, 60, 513, 1100)
"""Entries of the good chunks: below and above a block, and where compiled loops take over from numpy."""

_MOST_BYTES = 8 << 10
_NUMBERS = (0, 1, 2, 7, 8, 9, 511, 512, 513, 1 << 16, MAX_ENTRIES, MAX_ENTRIES + 1, 1 << 31, (1 << 32) - 1)
_LONG_NUMBERS = (*_NUMBERS, 1 << 32, (1 << 48) - 1, 1 << 48, 1 << 63, (1 << 64) - 1)
_INDEX_CODECS = (0, pb.INDEX_CODEC_DENSE, *INDEX_FORMATS, 77)
_VALUE_CODECS = (0, *VALUE_FORMATS, 77)


def good_chunks(folder: str = "") -> list[pb.Chunk]:
    """Return chunks that are taken, of one codec or of all."""
    chance = np.random.default_rng(5)
    chunks = []
    for index, index_format in INDEX_FORMATS.items():
        for value, value_format in VALUE_FORMATS.items():
            if folder in ("", "dense", index_format.name, value_format.name):
                for count in _COUNTS:
                    dense = folder == "dense"
                    offsets = (
                        np.cumsum(chance.geometric(0.2, count)) - 1 + (chance.integers(0, 2, count) * 900).cumsum()
                    )
                    segment = SparseSlice(
                        Span(0, count if dense else int(offsets[-1]) + 1),
                        None if dense else torch.from_numpy(offsets),
                        torch.from_numpy(chance.standard_normal(count).astype(np.float32)),
                    )
                    form = frames.WireForm(value, index)
                    chunks += [each.chunk for each in frames.encode(segment, form, chunk_bytes=1 << 20)]
    return chunks


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """Change, cut, lengthen or repeat a few places."""
    raw = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(raw) + 1)
        if chance.random() < 0.5:
            place = min(place, chance.randrange(20))  # headers are in front
        how = chance.randrange(6)
        if how == 0:
            del raw[place : place + chance.choice((1, 1, 4, len(raw)))]
        elif how == 1:
            raw[place:place] = chance.randbytes(chance.choice((1, 1, 4, 30)))
        elif how == 2:
            raw[place:place] = raw[place : place + chance.randrange(1, 40)]
        elif place < len(raw):
            raw[place] = chance.choice((raw[place] ^ 1 << chance.randrange(8), chance.randrange(256), 0, 255))
    return bytes(raw[:_MOST_BYTES])


def mutate(
    chunk: pb.Chunk, others: list[pb.Chunk], chance: random.Random, change: MutateBytes = mutate_bytes
) -> pb.Chunk:
    """Return a chunk that differs in one field or more; ``others`` lend theirs."""
    new = pb.Chunk()
    new.CopyFrom(chunk)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        how, other = chance.randrange(16), chance.choice(others)
        if how < 6:
            new.indices = change(new.indices, chance)
        elif how < 9:
            new.values = change(new.values, chance)
        elif how == 9:
            new.count = max(0, min(new.count + chance.choice((-1, 1, 8)), (1 << 32) - 1))
        elif how == 10:
            new.length = max(0, min(new.length + chance.choice((-1, 1, 8)), (1 << 64) - 1))
        elif how == 11:
            new.count = chance.choice(_NUMBERS)
        elif how == 12:
            new.length = chance.choice(_LONG_NUMBERS)
        elif how == 13:
            new.start = chance.choice(_LONG_NUMBERS)
        elif how == 14:
            new.index_codec, new.indices = chance.choice(((chance.choice(_INDEX_CODECS), new.indices), _indices(other)))
        else:
            new.value_codec, new.values = chance.choice(((chance.choice(_VALUE_CODECS), new.values), _values(other)))
    if chance.random() < 0.5:
        fit_values(new)
    return new


def fit_values(chunk: pb.Chunk) -> None:
    """Give a chunk as many value bytes as its count needs, where those are few: so that its indices are looked at."""
    value_format = VALUE_FORMATS.get(chunk.value_codec)
    size = value_format.size(chunk.count) if value_format else _MOST_BYTES + 1
    if size <= _MOST_BYTES:
        chunk.values = chunk.values[:size].ljust(size, b"\0")


def changed(folder: str, rounds: int, seed: int) -> Iterator[pb.Chunk]:
    """Yield so many changed chunks around one codec, the same ones for the same seed."""
    chance = random.Random(f"{folder} {seed}")
    seeds = good_chunks(folder) + [each.chunk for each in corpus() if each.name.startswith(f"{folder}/")]
    for _ in range(rounds):
        yield mutate(chance.choice(seeds), seeds, chance)


def campaign(folder: str, rounds: int, seed: int) -> Counter[str]:
    """Try changed chunks around one codec; return how many were taken, and refused for which reason.

    Raises:
        AssertionError: one was neither refused as it should nor kept the promises; the message has the chunk as text.
    """
    return Counter(outcome(chunk) for chunk in changed(folder, rounds, seed))


def outcome(chunk: pb.Chunk) -> str:
    """Return ``taken``, or the reason of the refusal."""
    try:
        refusal: Rejected | None = decode_within_memory(chunk)
    except BaseException as error:
        raise AssertionError(f"{error!r} where a refusal should be:\n{text_format.MessageToString(chunk)}") from error
    return refusal.reason.name if refusal else "taken"


def _indices(chunk: pb.Chunk) -> tuple[int, bytes]:
    return chunk.index_codec, chunk.indices


def _values(chunk: pb.Chunk) -> tuple[int, bytes]:
    return chunk.value_codec, chunk.values
