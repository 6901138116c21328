"""Bits, time and error of every codec, as the tables of docs/wire-format.md: ``python -m benchmarks.codecs``."""

import math
import time
from collections.abc import Callable

import numpy as np

from pscore.codecs.index import INDEX_FORMATS
from pscore.codecs.index.format import Offsets
from pscore.codecs.values import VALUE_FORMATS
from pscore.codecs.values.format import Values

_COUNT = 256 << 10
_REPEATS = 15
_DENSITIES = (0.3, 0.1, 0.01, 0.001)
_LARGEST_BITMAP = 1 << 25


def random_support(density: float, generator: np.random.Generator) -> Offsets:
    """Entries at random places, the first at 0."""
    offsets: Offsets = np.cumsum(generator.geometric(density, _COUNT))
    return offsets - offsets[0]


def clustered_supports(generator: np.random.Generator) -> dict[str, Offsets]:
    """About 1 % of 16 Mi elements, in the clusters that layers make."""
    size = 1 << 24
    rows = np.exp(generator.normal(0, 1.2, size // 512)).repeat(512)
    columns = np.resize(np.exp(generator.normal(0, 1.0, 576)), size)
    runs = np.zeros(size, bool)
    starts = np.flatnonzero(generator.random(size - 4) < 0.0025)
    for place in range(4):
        runs[starts + place] = True
    part = generator.random(size) < 0.01
    part[1_000_000:1_060_000] = True
    masks = {
        "rows of different density": generator.random(size) < 0.01 * rows / rows.mean(),
        "rows and columns of different density": generator.random(size)
        < 0.01 * rows * columns / (rows * columns).mean(),
        "runs of four": runs,
        "a dense tensor within": part,
    }
    return {name: np.flatnonzero(mask) - int(mask.argmax()) for name, mask in masks.items()}


def entropy(density: float) -> float:
    """Bits an entry that entries at random places need."""
    return -(density * math.log2(density) + (1 - density) * math.log2(1 - density)) / density


def nanoseconds(call: Callable[[], object], count: int) -> float:
    """Fastest of several calls, for each entry: other work on the machine only ever adds."""
    fastest = math.inf
    for _ in range(_REPEATS):
        began = time.perf_counter()
        call()
        fastest = min(fastest, time.perf_counter() - began)
    return fastest * 1e9 / count


def row(*cells: object) -> None:
    """Print a row of a table."""
    print("|", " | ".join(str(cell) for cell in cells), "|", flush=True)


def heading(*cells: str) -> None:
    """Print the head of a table."""
    print()
    row(*cells)
    row(*("---" for _ in cells))


def index_tables() -> None:
    """Bits and time by density, then bits on clusters."""
    generator = np.random.default_rng(0)
    heading("codec", *(f"{density * 100:g} %: bits, write + read ns" for density in _DENSITIES))
    row("entropy", *(f"{entropy(density):.2f}" for density in _DENSITIES))
    supports = {density: random_support(density, generator) for density in _DENSITIES}
    for index_format in INDEX_FORMATS.values():
        cells = []
        for offsets in supports.values():
            length = int(offsets[-1]) + 1
            if index_format.name == "bitmap" and length > _LARGEST_BITMAP:
                cells.append(f"{length / _COUNT:.0f}, –")
                continue
            data = index_format.encode(offsets, length)
            write = nanoseconds(lambda f=index_format, o=offsets, n=length: f.encode(o, n), _COUNT)
            read = nanoseconds(lambda f=index_format, d=data, n=length: f.decode(d, _COUNT, n), _COUNT)
            cells.append(f"{8 * len(data) / _COUNT:.2f}, {write:.1f} + {read:.1f}")
        row(index_format.name, *cells)
    gap_formats = [each for each in INDEX_FORMATS.values() if each.name in ("rice", "pcodec", "streamvbyte")]
    heading("support", "density", "entropy if random", *(each.name for each in gap_formats))
    for name, offsets in clustered_supports(generator).items():
        length = int(offsets[-1]) + 1
        density = offsets.size / length
        bits = (8 * len(each.encode(offsets, length)) / offsets.size for each in gap_formats)
        row(name, f"{density * 100:.2f} %", f"{entropy(density):.2f}", *(f"{each:.2f}" for each in bits))


def tails(density: float, generator: np.random.Generator) -> dict[str, Values]:
    """What top-k selection of this density leaves of 2 Mi values."""
    size = 1 << 21
    noise = (generator.laplace(size=size), generator.normal(size=size), generator.standard_t(3, size=size))
    return {
        name: each[np.abs(each) >= np.quantile(np.abs(each), 1 - density)].astype(np.float32)
        for name, each in zip(("Laplace", "normal", "Student t3"), noise, strict=True)
    }


def value_table() -> None:
    """Bits, time and relative squared error."""
    generator = np.random.default_rng(0)
    samples = {
        f"{name} {density * 100:g} %": values
        for density in (0.01, 0.1, 1.0)
        for name, values in tails(density, generator).items()
    }
    timed = generator.laplace(size=_COUNT).astype(np.float32)
    heading("codec", "bits", "write + read ns", *samples)
    for value_format in VALUE_FORMATS.values():
        data = value_format.write(timed)
        write = nanoseconds(lambda f=value_format: f.write(timed), _COUNT)
        read = nanoseconds(lambda f=value_format, d=data: f.decode(d, _COUNT), _COUNT)
        errors = []
        for values in samples.values():
            exact = values.astype(np.float64)
            errors.append(((value_format.encode(values)[1] - exact) ** 2).sum() / (exact**2).sum())
        cells = (f"{error:.1e}" if error else "0" for error in errors)
        row(value_format.name, f"{8 * len(data) / _COUNT:.2f}", f"{write:.1f} + {read:.1f}", *cells)


if __name__ == "__main__":
    index_tables()
    value_table()
