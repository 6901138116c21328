"""The books of a feed: what publishers were about to publish and were told, and what the director has asked for.

A line is written before the thing is done, and another one once it is done, with the seconds of the system's monotonic
clock, which all processes share.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from verify.model.words import Recipe
from verify.traffic.lines import Lines, read

PUBLISHERS = "publisher-*.book"


class Told(NamedTuple):
    """What a publisher was told of a publication: when, and under which generation of shard 0 and version it is."""

    at: float
    generation: int
    version: int


@dataclass(slots=True)
class Publication:
    """A model that may have been published from a time on, and was for sure if its publisher was told so."""

    name: str
    recipe: Recipe
    digest: str
    begun: float
    told: list[Told] = field(default_factory=list)


class PublisherBook:
    """The book of one life of a publisher."""

    def __init__(self, path: Path) -> None:
        self._lines = Lines(path)

    def begin(self, name: str, recipe: Recipe, digest: str) -> None:
        """Note a model before it is handed over for the first time."""
        self._add(kind="begun", name=name, recipe=[*recipe], digest=digest)

    def told(self, name: str, generation: int, version: int) -> None:
        """Note that the publication is a version of the feed."""
        self._add(kind="told", name=name, generation=generation, version=version)

    def trouble(self, why: str) -> None:
        """Note a publication that has raised."""
        self._add(kind="trouble", why=why)

    def _add(self, **what: Any) -> None:
        self._lines.add({"at": time.monotonic(), **what})


def read_books(paths: Iterable[Path]) -> tuple[dict[str, Publication], list[str]]:
    """Return all publications by name, and the troubles."""
    found: dict[str, Publication] = {}
    troubles = []
    for path in paths:
        for line in read(path):
            if line["kind"] == "begun":
                recipe = Recipe(*line["recipe"])
                found[line["name"]] = Publication(line["name"], recipe, line["digest"], line["at"])
            elif line["kind"] == "told":
                found[line["name"]].told.append(Told(line["at"], line["generation"], line["version"]))
            else:
                troubles.append(line["why"])
    return found, troubles
