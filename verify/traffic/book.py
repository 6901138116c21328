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

from verify.client.wire import Floats, Offsets, Push, Reply

_OF_A_PUSH = ("run", "worker", "incarnation", "shard", "step", "generation", "base", "start", "length")
_OF_A_REPLY = ("incarnation", "shard", "number", "version", "topk", "image", "whole", "applied", "digest")


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
        os.write(self._descriptor, _sent(push))

    def answered(self, push: Push, version: int, staleness: int, *, repeated: bool) -> None:
        self._write(
            {"kind": "answered", **_name(push), "version": version, "staleness": staleness, "repeated": repeated}
        )

    def refused(self, push: Push, why: str) -> None:
        """Note a refusal that sending again cannot mend."""
        self._write({"kind": "refused", **_name(push), "why": why})

    def pulled(self, reply: Reply) -> None:
        """Note an answer to a pull, and what the replica looks like with it."""
        line = {"kind": "pulled"} | {key: getattr(reply, key) for key in _OF_A_REPLY}
        os.write(self._descriptor, _entry(line, _bytes(reply.offsets, reply.values)))

    def trouble(self, why: str) -> None:
        """Note a call that failed and was made again."""
        self._write({"kind": "trouble", "why": why})

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self, entry: dict[str, Any]) -> None:
        os.write(self._descriptor, _entry(entry))


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry as it was read: its line, and the push that is about to be sent or the reply that came."""

    line: dict[str, Any]
    push: Push | None = None
    reply: Reply | None = None

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
        payload = data[end + 1 : position]
        if line["kind"] == "sent":
            yield Entry(line, push=_push(line, payload))
        elif line["kind"] == "pulled":
            yield Entry(line, reply=_reply(line, payload))
        else:
            yield Entry(line)


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
    line = {"kind": "sent", "dense": push.offsets is None} | {key: getattr(push, key) for key in _OF_A_PUSH}
    return _entry(line, _bytes(push.offsets, push.values))


def _push(line: dict[str, Any], payload: bytes) -> Push:
    offsets, values = _arrays(payload, dense=line["dense"])
    return Push(**{key: line[key] for key in _OF_A_PUSH}, offsets=offsets, values=values)


def _reply(line: dict[str, Any], payload: bytes) -> Reply:
    offsets, values = _arrays(payload, dense=False)
    assert offsets is not None
    return Reply(**{key: line[key] for key in _OF_A_REPLY}, offsets=offsets, values=values)


def _bytes(offsets: Offsets | None, values: Floats) -> bytes:
    return (b"" if offsets is None else offsets.astype("<u4").tobytes()) + values.astype("<f4").tobytes()


def _arrays(payload: bytes, *, dense: bool) -> tuple[Offsets | None, Floats]:
    count = len(payload) // (4 if dense else 8)
    offsets = None if dense else np.frombuffer(payload, "<u4", count)
    return offsets, np.frombuffer(payload, "<f4", count, 0 if dense else 4 * count)
