"""Models of a feed, computed from seeds in numpy alone: the publisher hands them over, and the judge knows them.

A model is the octets of its tensors, end to end. Each is made from an earlier one by a change that a seed draws, so a
line in a book is enough to compute it again.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Octets = NDArray[np.uint8]


class Tensor(NamedTuple):
    """A tensor of a feed; ``dtype`` as torch names it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * WIDTHS[self.dtype]


WIDTHS = {
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}

LAYOUTS: dict[str, tuple[Tensor, ...]] = {
    "octets": (
        Tensor("fp8", (201, 97), "float8_e4m3fn"),
        Tensor("mask", (3001,), "bool"),
        Tensor("scales", (9, 33), "float32"),
        Tensor("weights", (130, 121), "bfloat16"),
        Tensor("empty", (0, 3), "bfloat16"),
        Tensor("count", (), "int64"),
        Tensor("fp8_wide", (11, 300), "float8_e5m2"),
        Tensor("ids", (501,), "int64"),
        Tensor("wide", (7, 45), "float64"),
        Tensor("narrow", (50, 41), "float16"),
    ),
    "halves": (
        Tensor("weights", (140, 151), "bfloat16"),
        Tensor("empty", (0, 3), "float16"),
        Tensor("narrow", (3001,), "float16"),
        Tensor("scalar", (), "bfloat16"),
        Tensor("ids", (777,), "int16"),
        Tensor("head", (33, 200), "bfloat16"),
    ),
}
"""Tensors by the name of the layout: words of one octet, because some elements are so narrow, and of two."""

_STRANGE: dict[str, tuple[int, ...]] = {
    "float8_e4m3fn": (0x7F, 0xFF, 0x80, 0x01),
    "float8_e5m2": (0x7C, 0xFC, 0x7D, 0xFF, 0x80),
    "bfloat16": (0x7FC1, 0xFFA5, 0x7F80, 0xFF80, 0x8000, 0x0001),
    "float16": (0x7E03, 0xFD01, 0x7C00, 0xFC00, 0x8000, 0x0001),
    "float32": (0x7FC00123, 0xFFA00001, 0x7F800000, 0xFF800000, 0x80000000, 0x00000001),
    "float64": (0x7FF8000000000ABC, 0xFFF0000000000001, 0x7FF0000000000000, 0x8000000000000000, 1),
}
"""Bits that a number would lose: NaN with payloads, quiet and signalling, infinities, −0.0, subnormals."""

KINDS = ("none", "few", "some", "strange", "many", "all")
_SOME_SHARE, _MANY_SHARE, _STRANGE_SHARE = 0.01, 0.6, 0.03


class Recipe(NamedTuple):
    """How a model is made: from which other one (empty: from nothing), by which kind of change, drawn by which seed."""

    parent: str
    kind: str
    seed: int


def size_of(layout: str) -> int:
    """Return the octets of a layout's model."""
    return sum(tensor.nbytes for tensor in LAYOUTS[layout])


def changed(layout: str, before: Octets, recipe: Recipe) -> Octets:
    """Return the model that a recipe makes of the one before; the octets of booleans stay 0 or 1."""
    rng = np.random.default_rng(recipe.seed)
    octets, kind = before.copy(), recipe.kind
    if kind == "strange":
        for tensor, octets_of_it in parts(layout, octets):
            patterns = _STRANGE.get(tensor.dtype)
            if patterns is not None and octets_of_it.size:
                elements = octets_of_it.view(f"<u{WIDTHS[tensor.dtype]}")
                places = rng.choice(elements.size, max(1, int(_STRANGE_SHARE * elements.size)), replace=False)
                elements[places] = rng.choice(np.array(patterns, elements.dtype), places.size)
        return octets
    counts = {
        "none": 0,
        "few": int(rng.integers(1, 20)),
        "some": int(_SOME_SHARE * octets.size),
        "many": int(_MANY_SHARE * octets.size),
        "all": octets.size,
    }
    places = rng.choice(octets.size, counts[kind], replace=False)
    flips = rng.integers(1, 256, places.size, dtype=np.uint8)
    octets[places] ^= np.where(_are_booleans(layout)[places], np.uint8(1), flips)
    return octets


def parts(layout: str, octets: Octets) -> list[tuple[Tensor, Octets]]:
    """Return each tensor with its octets: a view of the model's."""
    found, start = [], 0
    for tensor in LAYOUTS[layout]:
        found.append((tensor, octets[start : start + tensor.nbytes]))
        start += tensor.nbytes
    return found


def _are_booleans(layout: str) -> NDArray[np.bool_]:
    return np.concatenate([np.full(tensor.nbytes, tensor.dtype == "bool") for tensor in LAYOUTS[layout]])


def digest(octets: Octets) -> str:
    """Name a model, or a part of one, by its bits."""
    return hashlib.blake2b(octets.tobytes(), digest_size=12).hexdigest()


class Models:
    """Models by their names, computed when they are asked for.

    Args:
        layout: of all of them.
        recipes: by the models' names; more may be put there later.
    """

    def __init__(self, layout: str, recipes: Mapping[str, Recipe]) -> None:
        self._layout, self._recipes = layout, recipes
        self._made: dict[str, Octets] = {"": np.zeros(size_of(layout), np.uint8)}

    def __getitem__(self, name: str) -> Octets:
        """Return a model."""
        way = []
        while name not in self._made:
            way.append(name)
            name = self._recipes[name].parent
        for each in reversed(way):
            recipe = self._recipes[each]
            self._made[each] = changed(self._layout, self._made[recipe.parent], recipe)
        return self._made[way[0] if way else name]
