"""Supports and values for the tests of the codecs."""

import numpy as np
from hypothesis import strategies as st

from pscore.wire.codecs.index import INDEX_FORMATS
from pscore.wire.codecs.values import VALUE_FORMATS

BLOCK = 512

each_index_gap = [0, 1, 2, 15, 16, 17, 254, 255, 256, 65534, 65535, 65536, (1 << 24) - 1, 1 << 24]


def offsets_of(gaps):
    """The offsets with these gaps."""
    return np.cumsum(np.array(gaps, dtype=np.int64) + 1) - 1


def length_of(offsets):
    """The shortest span that holds the offsets."""
    return int(offsets[-1]) + 1 if len(offsets) else 0


def random_support(density, count, seed=0):
    """Offsets at random places, the first at 0 as frames cut them."""
    gaps = np.random.default_rng(seed).geometric(density, count) - 1
    gaps[0] = 0
    return offsets_of(gaps)


@st.composite
def gap_lists(draw, huge=1 << 24):
    """Gaps in stretches of one kind each (runs, sparse, around every boundary of a format), over block boundaries."""
    gaps = []
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["run", "sparse", "any", "huge"]))
        size = draw(st.sampled_from([1, 2, 3, 7, 30, BLOCK - 1, BLOCK, BLOCK + 1]))
        generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        if kind == "run":
            gaps += [0] * size
        elif kind == "sparse":
            gaps += (generator.geometric(10.0 ** -draw(st.integers(0, 4)), size) - 1).tolist()
        elif kind == "any":
            gaps += generator.choice([gap for gap in each_index_gap if gap <= huge], min(size, 40)).tolist()
        else:
            gaps += [draw(st.integers(0, huge))]
    return gaps


each_index_format = {INDEX_FORMATS[codec].name: codec for codec in sorted(INDEX_FORMATS)}
each_value_format = {VALUE_FORMATS[codec].name: codec for codec in sorted(VALUE_FORMATS)}


def tail(name, density, size=1 << 20, seed=0):
    """What top-k selection leaves of Laplace, normal or Student-t3 noise: fp32."""
    generator = np.random.default_rng(seed)
    noise = {
        "laplace": lambda: generator.laplace(size=size),
        "normal": lambda: generator.normal(size=size),
        "student-t3": lambda: generator.standard_t(3, size=size),
    }[name]().astype(np.float32)
    threshold = np.quantile(np.abs(noise), 1 - density)
    return noise[np.abs(noise) >= threshold]


def squared_error(values, decoded):
    """Relative squared error."""
    exact = values.astype(np.float64)
    return float(((decoded - exact) ** 2).sum() / (exact**2).sum())
