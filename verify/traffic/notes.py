"""A reader's notes of the models that it has held, each with the versions of its shards."""

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from verify.client import wire
from verify.model import words
from verify.traffic.lines import Lines, read
from verify.traffic.tensors import octets_of, tensors_of

NOTES = "reader-*.notes"

Shards = Sequence[tuple[int, int]]
"""Generation and version of each shard, in order."""


class Notes(Protocol):
    """Notes of models of one layout."""

    def module(self) -> torch.nn.Module:
        """Return a module that can follow."""

    def add(self, shards: Shards, tensors: Mapping[str, torch.Tensor]) -> None:
        """Note a model that is held."""


class RunNotes:
    """Of a run's model in one tensor: a line is a shard, its version, and the digest of its values.

    Args:
        path: of the file.
        size: elements of the model.
        narrow: whether the reader has them in bfloat16.
    """

    def __init__(self, path: Path, size: int, *, narrow: bool) -> None:
        self._lines, self._size = Lines(path), size
        self._dtype = torch.bfloat16 if narrow else torch.float32
        self._digest = wire.rounded_digest if narrow else wire.digest

    def module(self) -> torch.nn.Module:
        return torch.nn.ParameterDict({wire.TENSOR: torch.zeros(self._size, dtype=self._dtype)})

    def add(self, shards: Shards, tensors: Mapping[str, torch.Tensor]) -> None:
        values = np.concatenate([tensor.detach().float().reshape(-1).numpy() for tensor in tensors.values()])
        count, lines = len(shards), []
        for shard, (_, version) in enumerate(shards):
            part = values[self._size * shard // count : self._size * (shard + 1) // count]
            lines.append((shard, version, self._digest(part)))
        self._lines.add(*lines)


class Claim(NamedTuple):
    """What a follower of a feed held from a time on.

    Attributes:
        at: seconds of the system's monotonic clock.
        shards: generation and version of each shard, as the follower tells.
        digest: of the whole model.
    """

    at: float
    shards: tuple[tuple[int, int], ...]
    digest: str


class FeedNotes:
    """Of a feed: a line is a :class:`Claim`; one that says the same as the line before is left out.

    Args:
        path: of the file.
        layout: of the feed.
    """

    def __init__(self, path: Path, layout: str) -> None:
        self._lines, self._layout = Lines(path), layout
        self._last: tuple[list[tuple[int, int]], str] | None = None
        self._lock = threading.Lock()

    def module(self) -> torch.nn.Module:
        module = torch.nn.Module()
        for name, tensor in tensors_of(self._layout, np.zeros(words.size_of(self._layout), np.uint8)).items():
            module.register_buffer(name, tensor)
        return module

    def add(self, shards: Shards, tensors: Mapping[str, torch.Tensor]) -> None:
        seen = [*shards], words.digest(octets_of(self._layout, tensors))
        with self._lock:
            if seen != self._last:
                self._last = seen
                self._lines.add([time.monotonic(), *seen])


def read_claims(path: Path) -> list[Claim]:
    """Return the notes of a feed's follower, in order."""
    return [Claim(at, tuple((each[0], each[1]) for each in shards), digest) for at, shards, digest in read(path)]
