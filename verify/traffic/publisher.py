"""A publisher that writes down what it is about to publish and what it was told.

Run as a process, ``python -m verify.traffic.publisher``. Its models are computed from seeds
(:mod:`verify.model.words`). It publishes until SIGTERM, then once more until that succeeds, and leaves. With ``--dies``
it kills itself at a place that a kill from outside seldom meets.
"""

import argparse
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Iterable
from itertools import count
from pathlib import Path

import torch

import psclient
from psclient.errors import ServerFaultError, SparsepsError
from psclient.publisher.baseline import Baseline
from psclient.settings import ClientSettings
from pscore.model.sparse_slice import SparseSlice
from verify.model import words
from verify.traffic.publications import PUBLISHERS, PublisherBook, read_books
from verify.traffic.tensors import tensors_of

PLACES = ("staged", "published", "half written", "written")
"""Where a publisher kills itself: every shard has staged the version; shard 0 has answered that it is published; the
baseline has a part of it; the baseline has all of it and does not say so."""

_WEIGHTS = {"none": 1, "few": 4, "some": 4, "strange": 2, "many": 1, "all": 1}
_SAME_AGAIN_SHARE, _ITERATOR_SHARE = 0.5, 0.3
_PAUSE_SECONDS = 0.0, 0.25
_SETTINGS = {"deadline_seconds": 2.0, "patience_seconds": 6.0, "connect_seconds": 15.0}


class _Life:
    """One life: its models, its book and its publisher."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._layout, self._name, self._rng = options.layout, options.name, random.Random(options.seed)
        published, _ = read_books(sorted(options.books.glob(PUBLISHERS)))
        self._recipes = {name: each.recipe for name, each in published.items()}
        self._models = words.Models(self._layout, self._recipes)
        self._parent, self._numbers, self._baseline = options.parent, count(), options.baseline
        self._has_failed = False  # what was handed over last
        self._book = PublisherBook(options.books / PUBLISHERS.replace("*", self._name))
        settings = ClientSettings.model_validate({"server": options.addresses, **_SETTINGS})
        self._publisher = psclient.Publisher(baseline=options.baseline, settings=settings)
        if options.dies:
            _die_at(self._publisher, options.dies, options.after)

    def publish(self) -> bool:
        """Publish the next model; tell whether it was published. The next one goes on from it in any case."""
        if not self._has_failed or self._rng.random() >= _SAME_AGAIN_SHARE:
            self._train()
        octets = self._models[self._parent]
        tensors = tensors_of(self._layout, octets)
        source = iter(tensors.items()) if self._rng.random() < _ITERATOR_SHARE else tensors
        try:
            found = self._publisher.publish(source)
        except ServerFaultError:
            raise
        except SparsepsError as error:
            self._book.trouble(type(error).__name__)
            self._has_failed = True
            return False
        self._has_failed = False
        about = json.loads(Path(f"{self._baseline}.json").read_text(encoding="utf-8"))
        self._book.told(self._parent, int(about["shards"][0][0], 16), found.version)
        return True

    def _train(self) -> None:
        kind = self._rng.choices([*_WEIGHTS], [*_WEIGHTS.values()])[0] if self._parent else "all"
        name = f"{self._name}.{next(self._numbers)}"
        recipe = self._recipes[name] = words.Recipe(self._parent, kind, self._rng.getrandbits(32))
        self._book.begin(name, recipe, words.digest(self._models[name]))
        self._parent = name

    def close(self) -> None:
        self._publisher.close()

    def pause(self, stop: threading.Event) -> None:
        stop.wait(self._rng.uniform(*_PAUSE_SECONDS))


def _die_at(publisher: psclient.Publisher, place: str, after: int) -> None:
    """Have the process kill itself at a place of its publication of this number."""
    baseline, settle, left = publisher._baseline, publisher._settle, count(after, -1)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def settle_or_die(run: object) -> object:
        if publisher._prepared is None or next(left) > 0:
            return settle(run)  # type: ignore[arg-type]
        if place == "staged":
            die()
        if place == "written":
            baseline.hold = lambda held: die()  # type: ignore[method-assign]
        else:
            baseline.change = change_or_die  # type: ignore[method-assign]
        return settle(run)  # type: ignore[arg-type]

    def change_or_die(changes: Iterable[SparseSlice]) -> None:
        if place == "half written":
            Baseline.change(baseline, [*changes][:1])
        die()

    publisher._settle = settle_or_die  # type: ignore[method-assign, assignment]


def main() -> int:
    """Run one life; 0 if it was told to stop and has published its last model."""
    parser = argparse.ArgumentParser(prog="python -m verify.traffic.publisher")
    parser.add_argument("--addresses", required=True)
    parser.add_argument("--books", type=Path, required=True, help="directory of all publishers' books")
    parser.add_argument("--name", required=True, help="of this life")
    parser.add_argument("--baseline", type=Path, required=True)
    parser.add_argument("--layout", choices=words.LAYOUTS, required=True)
    parser.add_argument("--parent", default="", help="the model that this life goes on from")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--dies", choices=PLACES)
    parser.add_argument("--after", type=int, default=0, help="publications before the one in which it dies")
    options = parser.parse_args()
    stop, parent = threading.Event(), os.getppid()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    torch.set_num_threads(1)
    life = _Life(options)
    while not stop.is_set() and os.getppid() == parent:
        life.publish()
        life.pause(stop)
    while os.getppid() == parent and not life.publish():
        life.pause(stop)
    life.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
