"""A reader that follows the model and writes down what it holds at every version: ``python -m verify.traffic.reader``.

It follows with a module or with a directory, through ``psclient``: a run in fp32 or in bfloat16, or a feed. Its notes
(:mod:`verify.traffic.notes`) are of what the module is while it is held, or of the files by their index. A reader that
follows with a directory reads it before it follows, as what its predecessor has left.
"""

import argparse
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

import psclient
from psclient.errors import FollowerNotReadyError
from psclient.reader.directory_sink import INDEX
from psclient.settings import ClientSettings
from verify.model.words import LAYOUTS
from verify.traffic.notes import FeedNotes, Notes, RunNotes, Shards

_DEADLINE_SECONDS = 5.0
_HOLD_SECONDS = 0.01


def _load(out: Path) -> tuple[Shards, dict[str, torch.Tensor]] | None:
    """Read a directory as another program does, by its index; ``None`` before the first version."""
    if not (out / INDEX).exists():
        return None
    index: dict[str, Any] = json.loads((out / INDEX).read_text(encoding="utf-8"))
    tensors = {}
    for name, file in index["weight_map"].items():
        with safe_open(out / file, "pt") as opened:
            tensors[name] = opened.get_tensor(name)
    shards = index["metadata"]["sparseps"]["shards"]
    return [(int(generation, 16), version) for generation, version, *_ in shards], tensors


def _shards(cut: psclient.Cut) -> Shards:
    return [(shard.generation, shard.version) for shard in cut.shards]


def main() -> int:
    """Run one life; 0 if it was told to stop."""
    parser = argparse.ArgumentParser(prog="python -m verify.traffic.reader")
    parser.add_argument("--addresses", required=True)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="follow with this directory; else with a module")
    parser.add_argument("--narrow", action="store_true", help="in bfloat16")
    parser.add_argument("--allow-older", action="store_true", help="follow a run that is taken back, too")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--size", type=int, help="elements of the run's model")
    what.add_argument("--feed", choices=LAYOUTS, help="layout of a feed")
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    stop, parent = threading.Event(), os.getppid()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    torch.set_num_threads(1)
    rng = random.Random(options.seed)
    notes: Notes = (
        FeedNotes(options.notes, options.feed)
        if options.feed
        else RunNotes(options.notes, options.size, narrow=options.narrow)
    )
    settings = ClientSettings(server=options.addresses, deadline_seconds=_DEADLINE_SECONDS)
    if options.out is not None:
        found = _load(options.out)
        if found is not None:
            notes.add(*found)

        def note(cut: psclient.Cut) -> None:
            loaded = _load(options.out)
            assert loaded is not None
            assert loaded[0] == _shards(cut)
            notes.add(*loaded)

        sink = psclient.DirectorySink(options.out, torch.bfloat16 if options.narrow else None)
        follower = psclient.Follower(None, sink, settings, on_cut=note, allow_older=options.allow_older)
    else:
        module = notes.module()
        follower = psclient.follow(None, module, settings=settings, allow_older=options.allow_older)
    with follower:
        while not stop.is_set() and os.getppid() == parent:
            if options.out is None:
                try:
                    with follower.hold(1.0) as cut:
                        stop.wait(rng.uniform(0, _HOLD_SECONDS))
                        notes.add(_shards(cut), module.state_dict())
                except FollowerNotReadyError:
                    continue
            stop.wait(rng.uniform(0, 0.1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
