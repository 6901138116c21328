"""A reader that follows the model and writes down what it holds at every version: ``python -m verify.traffic.reader``.

It follows with a module or with a directory, in fp32 or in bfloat16, through ``psclient``. A line of its notes is a
shard, its version, and the digest of its values: taken from the module while it is held, or from the files by their
index. A reader that follows with a directory reads it before it follows, as what its predecessor has left.
"""

import argparse
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

import psclient
from psclient.errors import FollowerNotReadyError
from psclient.reader.directory_sink import INDEX
from psclient.settings import ClientSettings
from verify.client import wire

DIRECTORY_SHARE = 0.5
_DEADLINE_SECONDS = 5.0
_HOLD_SECONDS = 0.01
NOTES = "reader-*.notes"


def flat_of(tensors: Iterable[torch.Tensor]) -> wire.Floats:
    """Lay tensors end to end, in fp32."""
    return np.concatenate([tensor.detach().float().reshape(-1).numpy() for tensor in tensors])


class Notes:
    """Writes lines of (shard, version, digest) to a file, each at once; ``narrow``: of values in bfloat16."""

    def __init__(self, path: Path, *, narrow: bool) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._digest = wire.rounded_digest if narrow else wire.digest
        self._lock = threading.Lock()

    def add(self, versions: list[int], values: wire.Floats) -> None:
        """Note a model and the versions of its shards."""
        count, size = len(versions), len(values)
        with self._lock:
            for shard, version in enumerate(versions):
                part = values[size * shard // count : size * (shard + 1) // count]
                self._file.write(json.dumps([shard, version, self._digest(part)]) + "\n")
            self._file.flush()


def read(path: Path) -> list[tuple[int, int, str]]:
    """Return the lines of a reader's notes; the last one may have been cut by a kill."""
    return [
        tuple(json.loads(line))
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
        if line[-1] == "\n"
    ]


def _load(out: Path) -> tuple[list[int], wire.Floats] | None:
    """Read a directory as another program does, by its index; ``None`` before the first version."""
    if not (out / INDEX).exists():
        return None
    index: dict[str, Any] = json.loads((out / INDEX).read_text(encoding="utf-8"))
    tensors = []
    for name, file in index["weight_map"].items():
        with safe_open(out / file, "pt") as opened:
            tensors.append(opened.get_tensor(name))
    return [shard[1] for shard in index["metadata"]["sparseps"]["shards"]], flat_of(tensors)


def main() -> int:
    """Run one life; 0 if it was told to stop."""
    parser = argparse.ArgumentParser(prog="python -m verify.traffic.reader")
    parser.add_argument("--addresses", required=True)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="follow with this directory; else with a module")
    parser.add_argument("--narrow", action="store_true", help="in bfloat16")
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    stop, parent = threading.Event(), os.getppid()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    torch.set_num_threads(1)
    notes, rng = Notes(options.notes, narrow=options.narrow), random.Random(options.seed)
    dtype = torch.bfloat16 if options.narrow else torch.float32
    settings = ClientSettings(server=options.addresses, deadline_seconds=_DEADLINE_SECONDS)
    if options.out is not None:
        found = _load(options.out)
        if found is not None:
            notes.add(*found)

        def note(cut: psclient.Cut) -> None:
            loaded = _load(options.out)
            assert loaded is not None
            assert loaded[0] == [shard.version for shard in cut.shards]
            notes.add(*loaded)

        follower = psclient.Follower(None, psclient.DirectorySink(options.out, dtype), settings, on_cut=note)
    else:
        module = torch.nn.ParameterDict({wire.TENSOR: torch.zeros(options.size, dtype=dtype)})
        follower = psclient.follow(None, module, settings=settings)
    with follower:
        while not stop.is_set() and os.getppid() == parent:
            if options.out is None:
                try:
                    with follower.hold(1.0) as cut:
                        stop.wait(rng.uniform(0, _HOLD_SECONDS))
                        notes.add([shard.version for shard in cut.shards], flat_of(module.values()))
                except FollowerNotReadyError:
                    continue
            stop.wait(rng.uniform(0, 0.1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
