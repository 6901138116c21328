"""The replica: reading, writing and adding by flat index, whatever shape and strides the parameters have."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from psclient.errors import ModelChangedError
from psclient.model.replica import Replica
from pscore.model.layout import Span, layout_of
from pscore.model.sparse_slice import SparseSlice
from tests.tiers import examples

KINDS = {
    "contiguous": lambda: torch.zeros(2, 3, 4, 5),
    "channels_last": lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.zeros(4, 30).t(),
    "slice": lambda: torch.zeros(10, 24)[:, ::2],
}


def replica_of(*tensors):
    parameters = [nn.Parameter(tensor) for tensor in tensors]
    return Replica(layout_of((f"p{i}", p) for i, p in enumerate(parameters)), parameters)


def contents(replica):
    """All elements in flat order, as fp32."""
    return torch.cat([p.detach().contiguous().reshape(-1).float() for p in replica.parameters])


def whole(replica):
    return Span(0, replica.layout.size)


def fp32_of(replica, position):
    return replica._fp32[position]


@pytest.mark.parametrize("kind", KINDS)
def test_writing_reaches_every_element_in_logical_order(kind):
    replica = replica_of(torch.zeros(3), KINDS[kind](), torch.zeros(()))
    before = [p.data_ptr() for p in replica.parameters]
    values = torch.arange(replica.layout.size).float()
    replica.write([SparseSlice(whole(replica), None, values)])
    assert torch.equal(contents(replica), values)
    assert [p.data_ptr() for p in replica.parameters] == before, "the user's tensors stay the same"


@pytest.mark.parametrize("kind", KINDS)
def test_strides_stay_as_they_were(kind):
    parameter = KINDS[kind]()
    replica = replica_of(parameter)
    replica.write([SparseSlice(whole(replica), torch.tensor([1]), torch.ones(1))])
    replica.add([SparseSlice(whole(replica), torch.tensor([1]), torch.ones(1))])
    assert replica.parameters[0].stride() == parameter.stride()
    assert contents(replica)[1] == 2


cuts = st.lists(st.integers(0, 130), max_size=4)
entry_sets = st.sets(st.integers(0, 129), max_size=130)


def pieces(edges, entries, values):
    """Cut the flat range into spans, dense where every element is named, and give each its entries."""
    found = []
    for low, high in pairwise(edges):
        chosen = sorted(entry - low for entry in entries if low <= entry < high)
        if not chosen:
            continue
        offsets = None if len(chosen) == high - low else torch.tensor(chosen)
        found.append(SparseSlice(Span(low, high), offsets, values[[low + c for c in chosen]]))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", ["write", "add"])
@given(cuts, entry_sets | st.just(set(range(130))), st.integers(0, 2**16))
@settings(deadline=None, max_examples=examples(40))
def test_segments_of_any_cut_touch_exactly_their_entries(kind, operation, cut, entries, seed):
    generator = torch.Generator().manual_seed(seed)
    replica = replica_of(torch.zeros(3, 2), KINDS[kind](), torch.zeros(0), torch.zeros(()), torch.zeros(3))
    assert replica.layout.size == 130
    start, values = torch.randn(130, generator=generator), torch.randn(130, generator=generator)
    replica.write([SparseSlice(whole(replica), None, start)])
    getattr(replica, operation)(pieces([0, *sorted(cut), 130], entries, values))
    expected = start.clone()
    chosen = torch.tensor(sorted(entries), dtype=torch.int64)
    expected[chosen] = values[chosen] if operation == "write" else start[chosen] + values[chosen]
    assert torch.equal(contents(replica), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_reading_gives_back_what_was_written(kind):
    replica = replica_of(torch.zeros(4), KINDS[kind](), torch.zeros(6).half())
    values = torch.arange(130).float()
    replica.write([SparseSlice(whole(replica), None, values)])
    for span in (whole(replica), Span(2, 127), Span(5, 5)):
        parts = list(replica.read(span))
        assert all(part.offsets is None and part.values.dtype == torch.float32 for part in parts)
        assert torch.equal(
            torch.cat([part.values for part in parts] or [torch.empty(0)]), values[span.start : span.end]
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dense", [True, False])
def test_half_precision_follows_an_fp32_copy(dtype, dense):
    replica = replica_of(torch.zeros(8, dtype=dtype), torch.zeros(8))
    replica.write([SparseSlice(whole(replica), None, torch.ones(16))])
    replica.open_fp32(whole(replica))
    tiny, offsets = 2.0**-14, None if dense else torch.arange(16)
    for _ in range(64):
        replica.add([SparseSlice(whole(replica), offsets, torch.full((16,), tiny))])
    assert torch.equal(fp32_of(replica, 0), torch.full((8,), 1 + 64 * tiny))
    assert torch.equal(replica.parameters[0], torch.full((8,), 1 + 64 * tiny).to(dtype))
    assert torch.equal(replica.parameters[1], torch.full((8,), 1 + 64 * tiny))


def test_an_fp32_copy_begins_anew_from_what_the_parameter_holds():
    replica = replica_of(torch.zeros(8).half(), torch.zeros(4).bfloat16())
    replica.open_fp32(whole(replica))
    replica.add([SparseSlice(whole(replica), None, torch.full((12,), 1e-6))])
    replica.write([SparseSlice(whole(replica), None, torch.full((12,), 0.5))])
    replica.open_fp32(Span(0, 4))
    assert fp32_of(replica, 0)[:4].tolist() == [0.5] * 4
    assert fp32_of(replica, 0)[4:].tolist() == [pytest.approx(1e-6)] * 4, "the other shard's part is not touched"
    replica.open_fp32(Span(4, 12))
    assert torch.equal(fp32_of(replica, 0), torch.full((8,), 0.5))
    assert torch.equal(fp32_of(replica, 1), torch.full((4,), 0.5))


def test_exact_values_are_rounded_to_the_parameters_dtype():
    replica = replica_of(torch.zeros(2).bfloat16(), torch.zeros(2))
    values = torch.tensor([1.001, 3.14159, 1.001, 3.14159])
    replica.write([SparseSlice(whole(replica), None, values)])
    assert torch.equal(replica.parameters[0].detach(), values[:2].bfloat16())
    assert torch.equal(replica.parameters[1].detach(), values[2:])


def test_parameters_with_gradients_may_be_written():
    replica = replica_of(torch.zeros(3))
    replica.parameters[0].sum().backward()
    replica.write([SparseSlice(whole(replica), None, torch.ones(3))])
    replica.add([SparseSlice(whole(replica), None, torch.ones(3))])
    assert replica.parameters[0].requires_grad
    assert replica.parameters[0].tolist() == [2, 2, 2]


def moved_to(parameter, tensor):
    parameter.data = tensor


def test_memory_that_was_replaced_by_the_same_values_is_taken_as_it_is():
    replica = replica_of(torch.zeros(3, 4), torch.ones(2).half())
    for parameter in replica.parameters:
        moved_to(parameter, parameter.detach().clone())
    assert replica.loaded() is None
    replica.write([SparseSlice(whole(replica), None, torch.arange(14).float())])
    assert replica.loaded() is None
    assert torch.equal(contents(replica), torch.arange(14).float())


def test_memory_with_other_values_is_a_load():
    replica = replica_of(torch.zeros(2), torch.zeros(3))
    moved_to(replica.parameters[1], torch.ones(3))
    assert replica.loaded() == "p1"
    assert replica.loaded() == "p1"
    replica.accept()
    assert replica.loaded() is None


@pytest.mark.parametrize(
    "replacement",
    [torch.zeros(4, 3), torch.zeros(3, 4).double(), torch.zeros(3, 4, device="meta")],
    ids=["shape", "dtype", "device"],
)
def test_memory_of_another_kind_is_named(replacement):
    replica = replica_of(torch.zeros(2), torch.zeros(3, 4))
    before = replica.parameters
    replica.parameters = (before[0], nn.Parameter(replacement))  # a meta tensor cannot be put into another one's place
    for look in (replica.loaded, replica.accept):
        with pytest.raises(ModelChangedError, match="p1") as caught:
            look()
        assert caught.value.tensor == "p1"
    replica.parameters = before
    assert replica.loaded() is None


def test_values_written_in_place_are_noticed_until_they_are_accepted():
    replica = replica_of(torch.zeros(2), torch.zeros(3, 4).t())
    ones = [SparseSlice(whole(replica), None, torch.ones(14))]
    replica.write(ones)
    assert replica.loaded() is None
    with torch.no_grad():
        replica.parameters[1].add_(1)
    assert replica.loaded() == "p1"
    replica.write(ones)
    assert replica.loaded() == "p1", "a reply may leave some of the others' values where they are"
    replica.accept()
    assert replica.loaded() is None


def test_parameters_that_are_parts_of_one_tensor_are_not_loaded_by_a_reply():
    whole_of_it = torch.zeros(5)
    replica = replica_of(whole_of_it[:2], whole_of_it[2:])
    replica.write([SparseSlice(whole(replica), None, torch.ones(5))])
    assert replica.loaded() is None
    replica.add([SparseSlice(whole(replica), None, torch.ones(5))])
    assert replica.loaded() is None
    assert whole_of_it.tolist() == [2.0] * 5


def test_a_parameter_without_a_count_of_writes_is_never_loaded():
    with torch.inference_mode():
        parameter = nn.Parameter(torch.zeros(3), requires_grad=False)
    replica = Replica(layout_of([("p0", parameter)]), [parameter])
    assert replica.loaded() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_digest_tells_values_from_others_wherever_they_lie(dtype):
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    digest = replica_of(values, torch.zeros(0), torch.zeros(())).digest()
    assert len(digest) == 32
    other_strides, other_start = (
        values.t().contiguous().t(),
        torch.cat([torch.zeros(1, dtype=dtype), values.reshape(-1)]),
    )
    assert replica_of(other_start[1:].view(3, 5), torch.zeros(0), torch.zeros(())).digest() == digest
    assert replica_of(other_strides, torch.zeros(0), torch.zeros(())).digest() == digest
    for permuted in (values.flip(0), values.flip(1), values[:, [1, 0, 2, 3, 4]]):
        assert replica_of(permuted, torch.zeros(0), torch.zeros(())).digest() != digest
    nearly = values.clone()
    nearly[1, 2] = torch.nextafter(nearly[1, 2].float(), torch.tensor(9.0)) if dtype == torch.float32 else 9.0
    assert replica_of(nearly, torch.zeros(0), torch.zeros(())).digest() != digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_found_wherever_it_is(dtype, bad):
    for size in (1, 7, 33, 1000):
        for place in {0, size // 2, size - 1}:
            good, other = torch.randn(5, 3).to(dtype).t(), torch.randn(size).to(dtype)
            replica = replica_of(good, torch.empty(0, dtype=dtype), other)
            assert replica.not_finite() is None
            with torch.no_grad():
                replica.parameters[2][place] = bad
            assert replica.not_finite() == "p2"
