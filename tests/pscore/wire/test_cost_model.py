"""The cost model: short codecs for slow links, quick ones for fast links, and only what the peer reads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pscore.wire.codecs.cost import choose, choose_for
from pscore.wire.codecs.index import INDEX_FORMATS
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.pscore.codec_makers import length_of, offsets_of, random_support

ALL = tuple(INDEX_FORMATS)
COUNT = 200_000
MEGABIT, GIGABIT = 125e3, 125e6  # bytes a second


def chosen(density, link, allowed=ALL, count=COUNT):
    return INDEX_FORMATS[choose(count, int(count / density), link, allowed)].name


@pytest.mark.parametrize("link", [None, 0.0, 50 * MEGABIT, 500 * MEGABIT])
@pytest.mark.parametrize(("density", "codec"), [(0.5, "bitmap"), (0.1, "rice"), (0.01, "rice"), (0.001, "rice")])
def test_slow_and_unknown_links_get_few_bytes(density, codec, link):
    assert chosen(density, link) == codec


def test_the_slowest_links_get_the_fewest_bytes():
    assert chosen(0.1, MEGABIT) == chosen(0.01, MEGABIT / 10) == "pcodec"


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
def test_fast_links_get_what_is_quick_to_write(density):
    assert chosen(density, 100 * GIGABIT) == "raw32"
    assert chosen(0.01, 3 * GIGABIT) == "streamvbyte"


def test_bitmaps_begin_near_thirty_per_cent():
    assert chosen(0.35, None) == "bitmap"
    assert chosen(0.2, None) == "rice"


@given(
    st.integers(1, 10**6),
    st.floats(1e-6, 1),
    st.none() | st.floats(0, 1e11),
    st.sets(st.sampled_from([*ALL, 77]), max_size=4),
)
def test_only_what_the_peer_reads_is_chosen_or_raw(count, density, link, allowed):
    codec = choose(count, int(count / density), link, allowed)
    assert codec in allowed or codec == pb.INDEX_CODEC_RAW32
    assert codec in INDEX_FORMATS


def runs(count, seed=0):
    """Four neighbours at a time, far apart: no parameter suits both kinds of gap."""
    gaps = np.zeros((count // 4, 4), np.int64)
    gaps[:, 0] = np.random.default_rng(seed).geometric(0.0025, count // 4)
    return offsets_of(gaps.reshape(-1))


@pytest.mark.parametrize(
    ("support", "link", "codec"),
    [
        (runs(COUNT), None, "pcodec"),
        (runs(COUNT), 10 * MEGABIT, "pcodec"),
        (runs(COUNT), 500 * MEGABIT, "rice"),
        (random_support(0.01, COUNT), None, "rice"),
        (random_support(0.01, COUNT), 10 * MEGABIT, "rice"),
    ],
    ids=["runs", "runs-slow", "runs-fast", "random", "random-slow"],
)
def test_clusters_are_seen_where_the_gain_pays(support, link, codec):
    assert INDEX_FORMATS[choose_for(support, length_of(support), link, ALL)].name == codec
    without = tuple({*ALL} - {pb.INDEX_CODEC_PCODEC})
    assert choose_for(support, length_of(support), link, without) in without


def test_pcodec_gains_a_third_on_runs():
    support = runs(COUNT)
    rice, pcodec = (
        len(INDEX_FORMATS[codec].encode(support, length_of(support)))
        for codec in (pb.INDEX_CODEC_RICE, pb.INDEX_CODEC_PCODEC)
    )
    assert pcodec < rice * 2 / 3
