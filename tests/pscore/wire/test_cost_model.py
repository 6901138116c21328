"""The cost model: short codecs for slow links, quick ones for fast links, and only what the peer reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pscore.wire.codecs.index import INDEX_FORMATS, choose
from pscore.wire.v1 import parameter_server_pb2 as pb

ALL = tuple(INDEX_FORMATS)
COUNT = 200_000
MEGABIT, GIGABIT = 125e3, 125e6  # bytes a second


def chosen(density, link, allowed=ALL, count=COUNT):
    return INDEX_FORMATS[choose(count, int(count / density), link, allowed)].name


@pytest.mark.parametrize("link", [None, 0.0, MEGABIT / 10, 50 * MEGABIT, 500 * MEGABIT])
@pytest.mark.parametrize(("density", "codec"), [(0.5, "bitmap"), (0.1, "rice"), (0.01, "rice"), (0.001, "rice")])
def test_slow_and_unknown_links_get_few_bytes(density, codec, link):
    assert chosen(density, link) == codec


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
def test_fast_links_get_what_is_quick_to_write(density):
    assert chosen(density, 100 * GIGABIT) == "raw32"


def test_few_entries_do_not_wait_for_the_compiler():
    assert chosen(0.01, None, count=255) == "raw32"
    assert chosen(0.01, None, count=256) == "rice"


def test_bitmaps_begin_near_thirty_per_cent():
    assert chosen(0.35, None) == "bitmap"
    assert chosen(0.2, None) == "rice"


@pytest.mark.parametrize(("columns", "codec"), [(1, "rice"), (4, "runs"), (64, "runs")])
def test_rows_are_written_as_runs(columns, codec):
    rows = 10_000
    assert INDEX_FORMATS[choose(rows * columns, 100 * rows * columns, None, ALL, rows)].name == codec


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
