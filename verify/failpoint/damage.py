"""Where a bit is flipped in what a server keeps, from the bytes that are documented (docs/operate/durability.md) alone.

Recovery begins at the newest snapshot: what lies before it is kept for going back, and is not needed. The numbers of
formats are spared: with a flipped bit they say that another release wrote the file, and no start gives that up.
"""

import random
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_FORMAT_WITHIN = 64
_MARK_AT = 8
_MARK_BYTES = 8
_FRAME_BYTES = 24
_PLACES = (
    "header, bytes 0-7",
    "header, bytes 8-15",
    "header, what follows",
    "a record's head",
    "a record's body",
    "last record",
)
_SOME = (_PLACES[1], _PLACES[4], _PLACES[5])
_FORMATS = re.compile(rb'(?<=\ASPSLOCK)[0-9]|(?<=\ASPSJRNL)[0-9]|(?<="format": )[0-9]')
_NUMBERS = re.compile(rb"(?<=: )[0-9]")  # with its lowest bit flipped, a digit is another digit


@dataclass(frozen=True, slots=True)
class Flip:
    """One bit.

    Attributes:
        place: in words.
        file: relative to the shard's folder.
        byte: of the file.
        bit: of the byte.
    """

    place: str
    file: Path
    byte: int
    bit: int

    def do(self, folder: Path) -> None:
        with (folder / self.file).open("r+b") as file:
            file.seek(self.byte)
            (old,) = file.read(1)
            file.seek(self.byte)
            file.write(bytes([old ^ 1 << self.bit]))


def draw(folder: Path, rng: random.Random) -> list[Flip]:
    """Draw a bit of each place that there is.

    Args:
        folder: a shard's, with several snapshots, and several segments behind the newest of them.
        rng: draws record, byte and bit.
    """
    segments = sorted((folder / "journal").glob("*.journal"))
    snapshots = sorted((folder / "snapshots").glob("[0-9]*"))
    first_needed = snapshots[-1].name.partition("-v")[0]
    needed = [path for path in segments if path.stem >= first_needed]
    flips = _of_segment(folder, "newest segment", needed[-1], rng)
    flips += _of_segment(folder, "older segment that is needed", rng.choice(needed[:-1]), rng, _SOME)
    flips += _of_segment(folder, "segment before the snapshot", rng.choice(segments[: -len(needed)]), rng, _SOME)
    for name, snapshot in (("newest", snapshots[-1]), ("older", rng.choice(snapshots[:-1]))):
        for what, file in (("manifest", "manifest.json"), ("tensors", "state.safetensors")):
            path = snapshot / file
            flips.append(_flip(f"{name} snapshot, {what}", folder, path, (0, path.stat().st_size), rng))
    lock = folder / "lock"
    flips.append(_flip("lock", folder, lock, (0, lock.stat().st_size), rng))
    manifest = snapshots[-1] / "manifest.json"
    numbers = (found.start() for found in _NUMBERS.finditer(manifest.read_bytes()))
    digit = rng.choice([number for number in numbers if number != _format_at(manifest)])
    flips.append(Flip("newest snapshot, a number in the manifest", manifest.relative_to(folder), digit, 0))
    return flips


def _of_segment(
    folder: Path,
    name: str,
    path: Path,
    rng: random.Random,
    places: Collection[str] = _PLACES,
) -> list[Flip]:
    data = path.read_bytes()
    begins = _records(data)
    number = rng.randrange(len(begins) - 1)
    begin, end, last = begins[number], begins[number + 1], begins[-1]
    spans = [
        (0, _MARK_AT),
        (_MARK_AT, _MARK_AT + _MARK_BYTES),
        (_MARK_AT + _MARK_BYTES, begins[0]),
        (begin, begin + _FRAME_BYTES),
        (begin + _FRAME_BYTES, end),
        (last, len(data)),
    ]
    return [
        _flip(f"{name}, {place}", folder, path, span, rng)
        for place, span in zip(_PLACES, spans, strict=True)
        if place in places and span[0] < span[1]
    ]


def _records(data: bytes) -> list[int]:
    """Find where the records of a segment begin: each with the mark that the segment's header has."""
    mark = data[_MARK_AT : _MARK_AT + _MARK_BYTES]
    found, position = [], data.find(mark, _MARK_AT + _MARK_BYTES)
    while position >= 0:
        found.append(position)
        position = data.find(mark, position + 1)
    return found


def _flip(place: str, folder: Path, path: Path, span: tuple[int, int], rng: random.Random) -> Flip:
    spared = _format_at(path)
    byte = rng.choice([byte for byte in range(*span) if byte != spared])
    return Flip(place, path.relative_to(folder), byte, rng.randrange(8))


def _format_at(path: Path) -> int:
    """Find the number of a file's format; -1 in tensors, which have none."""
    with path.open("rb") as file:
        found = _FORMATS.search(file.read(_FORMAT_WITHIN))
    return found.start() if found else -1
