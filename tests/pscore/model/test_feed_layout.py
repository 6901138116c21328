"""The layout of a feed: tensors of any data type as words, no element of which is cut; its digest, and its files."""

import struct
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pscore.model import modelfile
from pscore.model.digest import ModelDigest, total
from pscore.model.layout import WORDS, FrozenTensor, ModelLayout, Span, TensorSpec
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.layouts import first_difference, layout_to_message, pack_layout, unpack_layout
from pscore.wire.messages import DATA_TYPES
from tests.pscore.core_makers import any_words, feeds, spans
from tests.pscore.model.test_digest import HIGH, LOW, MASK, mixed
from tests.pscore.model.test_modelfile import write_parts
from tests.tiers import examples

many = settings(deadline=None, max_examples=examples(100))
in_tmp = settings(deadline=None, max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
BYTE, WIDE = TensorSpec("byte", (3,), torch.uint8), TensorSpec("wide", (2,), torch.int64)
HALF = TensorSpec("half", (5,), torch.bfloat16)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def same_bits(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape), name
        assert bits(one[name]) == bits(other[name]), name


@given(feeds())
@many
def test_tensors_lie_end_to_end_in_words(layout):
    position = 0
    for number, spec in enumerate(layout.parameters):
        words = spec.numel * spec.dtype.itemsize // layout.word_bytes
        assert layout.length(spec) == words
        assert layout.span(number) == Span(position, position + words)
        position += words
    assert layout.size == position
    assert layout.value_dtype == WORDS[layout.word_bytes]
    assert layout.value_dtype.itemsize == layout.word_bytes


@given(feeds(), st.integers(1, 12))
@many
def test_shards_cut_no_element_and_are_as_long_as_each_other_within_one(layout, num_shards):
    cuts = layout.shard_spans(num_shards)
    assert len(cuts) == num_shards
    assert (cuts[0].start, cuts[-1].end) == (0, layout.size)
    assert all(left.end == right.start for left, right in pairwise(cuts))
    begins = {
        layout.offsets[position] + element * (spec.dtype.itemsize // layout.word_bytes)
        for position, spec in enumerate(layout.parameters)
        for element in range(spec.numel)
    } | {layout.size}
    assert {cut.start for cut in cuts} <= begins
    widest = max(spec.dtype.itemsize for spec in layout.parameters) // layout.word_bytes
    lengths = [cut.length for cut in cuts]
    assert max(lengths) - min(lengths) <= 1 + 2 * (widest - 1)


@given(st.data())
@many
def test_a_feed_has_the_dtype_of_its_words_everywhere(data):
    layout = data.draw(feeds())
    span = data.draw(spans(layout.size))
    assert layout.dtype_runs(span) == ([(layout.value_dtype, span)] if span.length else [])
    assert layout.viewed_in(torch.bfloat16) is layout


@given(feeds().filter(lambda layout: layout.size))
@many
def test_a_feed_travels_as_it_is(layout):
    again = unpack_layout(pack_layout(layout))
    assert again == layout
    assert again.offsets == layout.offsets
    assert again.fingerprint == layout.fingerprint


def test_the_width_of_words_changes_the_fingerprint_and_the_difference_has_words():
    made = [ModelLayout((TensorSpec("w", (4,), torch.float32),), word_bytes=width) for width in (0, 1, 2, 4)]
    assert len({layout.fingerprint for layout in made}) == 4
    messages = [layout_to_message(layout) for layout in made]
    for one, ours in zip(made, messages, strict=True):
        for other, theirs in zip(made, messages, strict=True):
            _, how = first_difference(ours, theirs) or ("", "")
            if one is other:
                assert not how
            elif not one.word_bytes:
                assert "the run trains a model, and this worker publishes" in how
            elif not other.word_bytes:
                assert "the run is a feed, and this worker trains" in how
            else:
                assert f"words of {other.word_bytes} bytes; the feed has words of {one.word_bytes}" in how


@pytest.mark.parametrize("width", [-1, 3, 5, 8, 1 << 31])
def test_there_are_no_words_of_other_widths(width):
    with pytest.raises(ValueError, match="1, 2, 4"):
        ModelLayout((WIDE,), word_bytes=width)


@pytest.mark.parametrize(("spec", "width"), [(BYTE, 2), (BYTE, 4), (HALF, 4)])
def test_a_tensor_that_does_not_consist_of_whole_words_is_refused(spec, width):
    with pytest.raises(ValueError, match=f"{spec.name} .* does not consist of words of {width}"):
        ModelLayout((WIDE, spec), word_bytes=width)
    with pytest.raises(ValueError, match=spec.name):
        ModelLayout((spec,) * 2, word_bytes=1)  # twice


@pytest.mark.parametrize("dtype", DATA_TYPES, ids=str)
def test_what_is_laid_out_can_be_written_to_a_file_or_is_refused(dtype, tmp_path):
    spec = TensorSpec("w", (6,), dtype)
    if dtype in (torch.complex32, torch.complex128):
        with pytest.raises(ValueError, match=r"w .* model files have no tensors of this dtype"):
            ModelLayout((spec,), word_bytes=1)
        return
    layout = ModelLayout((spec,), word_bytes=1)
    words = any_words(layout, 1)
    parts = write_parts(tmp_path / "m.safetensors", layout, words, 2)
    same_bits(modelfile.read_parts(parts), modelfile.assemble(layout, words))


@pytest.mark.parametrize("others", [{"buffers": (BYTE,)}, {"frozen": (FrozenTensor(BYTE, bytes(32)),)}])
def test_a_feed_has_neither_buffers_nor_frozen_parameters(others):
    with pytest.raises(ValueError, match="all tensors of a feed"):
        ModelLayout((WIDE,), word_bytes=1, **others)


# Digest


def digest_of(layout, words, span=None):
    digest = ModelDigest(layout)
    digest.add(SparseSlice(span or Span(0, layout.size), None, words))
    return digest.value


@given(feeds(), st.integers(0, 2**16))
@many
def test_the_digest_of_a_feed_is_the_sum_over_its_words_that_the_format_says(layout, seed):
    words = any_words(layout, seed)
    octets, width = bytes(bits(words)), layout.word_bytes
    plain = [int.from_bytes(octets[i : i + width], "little") for i in range(0, len(octets), width)]
    halves = [sum(mixed(index, word, *keys) for index, word in enumerate(plain)) & MASK for keys in (LOW, HIGH)]
    assert digest_of(layout, words) == struct.pack("<QQ", *halves)


@given(feeds(), st.integers(0, 2**16), st.integers(1, 4))
@many
def test_the_digest_of_a_feed_follows_changes_and_is_the_sum_of_shards(layout, seed, num_shards):
    before, after = any_words(layout, seed), any_words(layout, seed + 1)
    places = (before != after).nonzero().view(-1)[::2]
    digest = ModelDigest(layout, digest_of(layout, before))
    digest.remove(SparseSlice(Span(0, layout.size), places, before[places]))
    digest.add(SparseSlice(Span(0, layout.size), places, after[places]))
    changed = before.clone()
    changed[places] = after[places]
    assert digest.value == digest_of(layout, changed)
    parts = [digest_of(layout, changed[cut.start : cut.end], cut) for cut in layout.shard_spans(num_shards)]
    assert total(parts) == digest.value


# Files


@given(feeds(), st.integers(0, 2**16))
@many
def test_words_become_tensors_and_words_again(layout, seed):
    words = any_words(layout, seed)
    state = modelfile.assemble(layout, words)
    assert [(name, tuple(each.shape), each.dtype) for name, each in state.items()] == [
        (spec.name, spec.shape, spec.dtype) for spec in layout.parameters
    ]
    assert [octet for each in state.values() for octet in bits(each)] == bits(words)
    assert bits(modelfile.flatten(layout, state)) == bits(words)


@given(feeds(), st.integers(2, 5), st.integers(0, 2**16))
@in_tmp
def test_the_parts_of_all_shards_of_a_feed_join_to_the_whole(tmp_path, layout, num_shards, seed):
    words = any_words(layout, seed)
    parts = write_parts(tmp_path / "m.safetensors", layout, words, num_shards)
    joined, whole = modelfile.read_parts(parts), modelfile.assemble(layout, words)
    lacks = {name for name, tensor in whole.items() if not tensor.numel()}  # in no part, and so of no dtype
    same_bits(*({name: each for name, each in state.items() if name not in lacks} for state in (joined, whole)))
    assert all(joined[name].shape == whole[name].shape for name in lacks)


def test_a_tensor_of_another_dtype_has_other_words_and_is_refused():
    layout = ModelLayout((HALF, WIDE), word_bytes=2)
    state = modelfile.assemble(layout, any_words(layout, 0))
    with pytest.raises(modelfile.ModelFileError, match=r"half .* has dtype torch\.float16"):
        modelfile.flatten(layout, state | {"half": state["half"].half()})
    trained = replace(ModelLayout((HALF,)), parameters=(replace(HALF, dtype=torch.float32),))
    assert modelfile.flatten(trained, {"half": torch.ones(5, dtype=torch.float16)}).dtype == torch.float32


def test_tensors_that_are_not_contiguous_are_flattened_in_order():
    layout = ModelLayout((TensorSpec("w", (3, 2), torch.int64),), word_bytes=4)
    turned = torch.arange(6).view(2, 3).t()
    assert modelfile.flatten(layout, {"w": turned}).view(torch.int64).tolist() == [0, 3, 1, 4, 2, 5]
