"""The flat layout: where tensors lie, how shards cut it, and when two models are the same."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import FrozenTensor, ModelLayout, Span, TensorSpec, layout_of
from pscore.wire.layouts import first_difference, layout_to_message
from tests.pscore.core_makers import layouts, spans
from tests.tiers import examples

A = TensorSpec("a", (2, 3), torch.float32)
B = TensorSpec("b", (4,), torch.float32)
COUNT = TensorSpec("count", (), torch.int64)


def difference(ours, theirs):
    return first_difference(layout_to_message(ours), layout_to_message(theirs))


def dtype_at(layout):
    return [spec.dtype for spec in layout.parameters for _ in range(spec.numel)]


def owner_of(layout):
    return [position for position, spec in enumerate(layout.parameters) for _ in range(spec.numel)]


@given(layouts())
@settings(deadline=None, max_examples=examples(50))
def test_tensors_lie_end_to_end_in_order(layout):
    assert layout.offsets[0] == 0
    assert layout.size == sum(spec.numel for spec in layout.parameters)
    for position, spec in enumerate(layout.parameters):
        assert layout.span(position) == Span(layout.offsets[position], layout.offsets[position] + spec.numel)


@given(layouts(), st.integers(1, 9))
@settings(deadline=None, max_examples=examples(100))
def test_shards_are_contiguous_complete_and_balanced(layout, num_shards):
    cut = layout.shard_spans(num_shards)
    assert len(cut) == num_shards
    assert (cut[0].start, cut[-1].end) == (0, layout.size)
    assert all(left.end == right.start for left, right in pairwise(cut))
    lengths = [span.length for span in cut]
    assert max(lengths) - min(lengths) <= 1


@given(st.data())
@settings(deadline=None, max_examples=examples(100))
def test_overlapping_finds_each_parameter_that_shares_elements(data):
    layout = data.draw(layouts())
    span = data.draw(spans(layout.size))
    found = list(layout.overlapping(span))
    assert [index for _, common in found for index in range(common.start, common.end)] == list(
        range(span.start, span.end)
    )
    assert [position for position, common in found for _ in range(common.length)] == owner_of(layout)[
        span.start : span.end
    ]
    assert all(common.length for _, common in found)


@given(st.data())
@settings(deadline=None, max_examples=examples(100))
def test_dtype_runs_are_the_longest_pieces_of_one_dtype(data):
    layout = data.draw(layouts())
    span = data.draw(spans(layout.size))
    runs = list(layout.dtype_runs(span))
    assert [dtype for dtype, run in runs for _ in range(run.length)] == dtype_at(layout)[span.start : span.end]
    assert all(left[0] != right[0] and left[1].end == right[1].start for left, right in pairwise(runs))


@given(st.data())
@settings(deadline=None, max_examples=examples(50))
def test_intersection_is_what_two_spans_share(data):
    one, other = data.draw(spans(20)), data.draw(spans(20))
    shared = set(range(one.start, one.end)) & set(range(other.start, other.end))
    common = one.intersect(other)
    assert set(range(common.start, common.end)) == shared
    assert common.length == len(shared)


def test_scalars_have_one_element_and_empty_tensors_none():
    layout = ModelLayout((TensorSpec("s", (), torch.float32), TensorSpec("e", (3, 0), torch.float32), A))
    assert layout.offsets == (0, 1, 1, 7)
    assert [position for position, _ in layout.overlapping(Span(0, 7))] == [0, 2]


def test_equal_models_have_equal_fingerprints():
    assert ModelLayout((A, B), (COUNT,)).fingerprint == ModelLayout((A, B), (COUNT,)).fingerprint


@pytest.mark.parametrize(
    "other",
    [
        ModelLayout((TensorSpec("x", (2, 3), torch.float32), B), (COUNT,)),
        ModelLayout((TensorSpec("a", (3, 2), torch.float32), B), (COUNT,)),
        ModelLayout((TensorSpec("a", (6,), torch.float32), B), (COUNT,)),
        ModelLayout((TensorSpec("a", (2, 3), torch.bfloat16), B), (COUNT,)),
        ModelLayout((B, A), (COUNT,)),
        ModelLayout((A,), (COUNT,)),
        ModelLayout((A, B), ()),
        ModelLayout((A, B), (TensorSpec("count", (), torch.int32),)),
        ModelLayout((A,), (B, COUNT)),
    ],
    ids=["name", "shape", "rank", "dtype", "order", "fewer", "no-buffer", "buffer-dtype", "parameter-as-buffer"],
)
def test_fingerprint_changes_with(other):
    ours = ModelLayout((A, B), (COUNT,))
    assert ours.fingerprint != other.fingerprint
    assert difference(ours, other) is not None


def test_aliases_do_not_change_the_model():
    tied = ModelLayout((TensorSpec("a", (2, 3), torch.float32, ("tied.a",)), B))
    assert tied.fingerprint == ModelLayout((A, B)).fingerprint
    assert difference(tied, ModelLayout((A, B))) is None


def test_first_difference_names_the_first_tensor_that_differs():
    ours = ModelLayout((A, B), (COUNT,))
    name, how = difference(ours, ModelLayout((A, TensorSpec("b", (5,), torch.float32)), ()))
    assert name == "b"
    assert "b [5] float32" in how
    assert "b [4] float32" in how


@pytest.mark.parametrize(
    ("theirs", "name"),
    [(ModelLayout((A,), (COUNT,)), "b"), (ModelLayout((A, B), ()), "count"), (ModelLayout((B, A), (COUNT,)), "b")],
    ids=["lacking parameter", "lacking buffer", "swapped"],
)
def test_first_difference_names_what_is_lacking_or_moved(theirs, name):
    assert difference(ModelLayout((A, B), (COUNT,)), theirs)[0] == name
    assert difference(ModelLayout((A, B), (COUNT,)), ModelLayout((A, B), (COUNT,))) is None


def test_first_difference_names_what_is_too_many():
    assert difference(ModelLayout((A,)), ModelLayout((A, B)))[0] == "b"


@pytest.mark.parametrize("buffers", [(), (A,)])
def test_a_name_may_occur_once(buffers):
    with pytest.raises(ValueError, match="'a' occurs twice"):
        ModelLayout((A, A) if not buffers else (A,), buffers)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_only_single_and_half_precision_can_be_trained(dtype):
    with pytest.raises(ValueError, match=r"parameter w \[2\]"):
        ModelLayout((TensorSpec("w", (2,), dtype),))
    assert ModelLayout((A,), (TensorSpec("w", (2,), dtype),)).buffers[0].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.float8_e4m3fn])
def test_any_dtype_may_be_frozen(dtype):
    spec = TensorSpec("w", (2,), dtype)
    with pytest.raises(ValueError, match=r"parameter w \[2\]"):
        ModelLayout((spec,))
    with pytest.raises(ValueError, match=r"buffer w \[2\].*persistent=False"):
        ModelLayout((A,), (spec,))
    assert ModelLayout((A,), frozen=(FrozenTensor(spec, bytes(32)),)).frozen[0].spec == spec


@pytest.mark.parametrize("place", ["parameters", "buffers", "frozen"])
def test_a_tensor_without_values_is_refused(place):
    tensors = {"parameters": [("w", torch.zeros(2))], place: [("v", torch.zeros(2, device="meta"))]}
    with pytest.raises(ValueError, match="v is on the meta device"):
        layout_of(**{"buffers": []} | tensors)


def test_layout_of_reads_names_shapes_dtypes_and_aliases():
    layout = layout_of(
        [("w", torch.zeros(2, 3, dtype=torch.float16))], [("n", torch.tensor(0))], {"w": ("head.w", "tail.w")}
    )
    assert layout.parameters == (TensorSpec("w", (2, 3), torch.float16, ("head.w", "tail.w")),)
    assert layout.buffers == (TensorSpec("n", (), torch.int64),)
    assert layout.parameters[0].nbytes == 12


@given(
    st.lists(st.integers(1, 9000) | st.sampled_from([512, 4095, 4096, 3_000_000]), min_size=1, max_size=80),
    st.integers(0, 5000),
)
def test_small_tensors_are_sent_whole_as_long_as_they_are_few(sizes, dense_below):
    layout = ModelLayout(tuple(TensorSpec(f"w{n}", (size,), torch.float32) for n, size in enumerate(sizes)))
    limit, most = layout.whole_below(dense_below), max(1 << 16, sum(sizes) // 20)
    assert limit <= dense_below
    assert sum(size for size in sizes if size < limit) <= most
    if limit < dense_below:
        assert sum(size for size in sizes if size <= limit) > most, "and no fewer than may be"


def test_adapters_are_selected_from_and_the_biases_of_a_large_model_are_not():
    adapters = ModelLayout(tuple(TensorSpec(f"w{n}", (512,), torch.float32) for n in range(5000)))
    large = [TensorSpec(f"w{n}", (1 << 20,), torch.float32) for n in range(20)]
    biases = [TensorSpec(f"b{n}", (4000,), torch.float32) for n in range(200)]
    assert adapters.whole_below(4096) == 512
    assert ModelLayout((*large, *biases)).whole_below(4096) == 4096
