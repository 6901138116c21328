"""A block's places in the whole tensor, for blocks of any shape."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from psclient.model.blocks import Block
from pscore.model.layout import TensorSpec


@st.composite
def runs_of(draw, size):
    """Draw ascending ranges within a dimension: all of it, one, several, or none."""
    borders = sorted(draw(st.sets(st.integers(0, size), max_size=6)))
    runs = [(start, end) for start, end in zip(borders[::2], borders[1::2], strict=False)]
    whole = [(0, size)] if size else []
    return tuple(draw(st.sampled_from([whole, runs, runs[:1]])))


@st.composite
def blocks(draw):
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    return Block(TensorSpec("x", shape, torch.float32), tuple(draw(runs_of(size)) for size in shape))


@given(blocks(), st.sampled_from([1, 2, 4]))
def test_words_of_a_block_lie_where_its_elements_do(block, words):
    numbers = np.arange(words * block.spec.numel, dtype=np.int64)
    mine = numbers.reshape(*block.spec.shape, words)[np.ix_(*block.indices())].reshape(-1)
    assert mine.size == words * block.numel
    assert np.array_equal(block.of(numbers, words), mine)
    places = np.arange(mine.size, dtype=np.int64)
    assert np.array_equal(block.offsets(places, words), mine)
    assert np.array_equal(block.offsets(places[1::3], words), mine[1::3])
    written = np.full_like(numbers, -1)
    block.write(written, mine, words)
    assert np.array_equal(written[mine], mine)
    assert (np.delete(written, mine) == -1).all()


@given(blocks())
def test_a_block_knows_its_elements_by_their_offsets_in_the_whole(block):
    mine = block.offsets(np.arange(block.numel, dtype=np.int64), 1)
    for offset in range(block.spec.numel + 1):
        assert block.before(offset) == (mine < offset).sum()
    some = np.arange(block.spec.numel, dtype=np.int64)[::2]
    which, places = block.inside(some)
    assert np.array_equal(some[which], mine[mine % 2 == 0])
    assert np.array_equal(mine[places], some[which])
