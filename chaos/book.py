"""A worker's book: what it was about to send, and what it was answered, each written before the next thing is done.

An entry is a line of JSON, and the bytes that the line counts. It is one ``write``, so it is in the kernel's hands
when the call returns, and a worker that is killed takes nothing of it along. A torn last entry was never acted upon.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chaos.wire import Push


class Book:
    """One life's entries, appended to a file of its own."""

    def __init__(self, path: Path) -> None:
        """Begin; the file must not exist."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def begun(self, inherited: list[Push]) -> None:
        """Note that this life has taken over what its predecessor left in doubt."""
        entries = [_entry({"kind": "begun"}), *(_sent(push) for push in inherited)]
        os.write(self._descriptor, b"".join(entries))

    def sent(self, push: Push) -> None:
        """Note what is about to be sent."""
        os.write(self._descriptor, _sent(push))

    def answered(self, push: Push, version: int, staleness: int, *, repeated: bool) -> None:
        """Note an answer."""
        self._write(
            {"kind": "answered", **_name(push), "version": version, "staleness": staleness, "repeated": repeated}
        )

    def refused(self, push: Push, why: str) -> None:
        """Note a refusal that sending again cannot mend."""
        self._write({"kind": "refused", **_name(push), "why": why})

    def pulled(self, shard: int, version: int, digest: str, *, whole: bool) -> None:
        """Note what a replica looks like after a pull."""
        self._write({"kind": "pulled", "shard": shard, "version": version, "digest": digest, "whole": whole})

    def trouble(self, why: str) -> None:
        """Note a call that failed and was made again."""
        self._write({"kind": "trouble", "why": why})

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _write(self, entry: dict[str, Any]) -> None:
        os.write(self._descriptor, _entry(entry))


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry as it was read: its line, and the push where it is about to be sent."""

    line: dict[str, Any]
    push: Push | None

    @property
    def name(self) -> tuple[str, int, int]:
        """Which push it is about: incarnation, shard, step."""
        return self.line["incarnation"], self.line["shard"], self.line["step"]


def read(path: Path) -> Iterator[Entry]:
    """Read a book up to its last whole entry."""
    data = path.read_bytes()
    position = 0
    while (end := data.find(b"\n", position)) >= 0:
        line = json.loads(data[position:end])
        position = end + 1 + line.get("bytes", 0)
        if position > len(data):
            return
        yield Entry(line, _push(line, data[end + 1 : position]) if line["kind"] == "sent" else None)


def in_doubt(path: Path) -> list[Push]:
    """Return the pushes of a book that were perhaps sent and have no answer in it."""
    open_pushes: dict[tuple[str, int, int], Push] = {}
    for entry in read(path):
        if entry.push is not None:
            open_pushes[entry.name] = entry.push
        elif entry.line["kind"] in ("answered", "refused"):
            open_pushes.pop(entry.name, None)
    return list(open_pushes.values())


def _name(push: Push) -> dict[str, Any]:
    return {"incarnation": push.incarnation, "shard": push.shard, "step": push.step}


def _entry(line: dict[str, Any], payload: bytes = b"") -> bytes:
    if payload:
        line["bytes"] = len(payload)
    return json.dumps(line).encode() + b"\n" + payload


def _sent(push: Push) -> bytes:
    line = {"kind": "sent", **_name(push)} | {
        key: getattr(push, key) for key in ("run", "worker", "generation", "base", "start", "length")
    }
    line["dense"] = push.offsets is None
    offsets = b"" if push.offsets is None else push.offsets.astype("<u4").tobytes()
    return _entry(line, offsets + push.values.astype("<f4").tobytes())


def _push(line: dict[str, Any], payload: bytes) -> Push:
    count = len(payload) // (4 if line["dense"] else 8)
    offsets = None if line["dense"] else np.frombuffer(payload, "<u4", count)
    values = np.frombuffer(payload, "<f4", count, 0 if line["dense"] else 4 * count)
    names = ("run", "worker", "incarnation", "shard", "step", "generation", "base", "start", "length")
    return Push(**{name: line[name] for name in names}, offsets=offsets, values=values)
