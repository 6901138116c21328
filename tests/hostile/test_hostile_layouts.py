"""Layouts that lie: what a joining worker says of its model is refused before anything is allocated for it."""

import math
import random
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import ModelLayout, TensorSpec
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.layouts import layout_to_message, unpack_layout
from pscore.wire.messages import DATA_TYPES
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.durability.initial_model import fit
from tests.hostile.mutation import mutate_bytes
from tests.packed import packed

many = settings(deadline=None, max_examples=300)
LAYOUT = ModelLayout((TensorSpec("w", (2, 3), torch.float32),), (TensorSpec("n", (), torch.int64),))


def message(parameters, buffers=()):
    """A layout of (name, shape, data type), packed with the fingerprint that its sender would state."""
    found = pb.ModelLayout()
    for kind, specs in ((found.parameters, parameters), (found.buffers, buffers)):
        for name, shape, data_type in specs:
            kind.add(name=name, shape=shape, data_type=data_type)
    dtypes = {code: dtype for dtype, code in DATA_TYPES.items()}
    try:
        fingerprint = ModelLayout(
            *(
                tuple(TensorSpec(name, tuple(shape), dtypes.get(code, torch.float32)) for name, shape, code in specs)
                for specs in (parameters, buffers)
            )
        ).fingerprint
    except ValueError:
        fingerprint = bytes(32)
    return packed(found, fingerprint=fingerprint)


def taken_or_refused(found):
    """Read it; whatever is taken has sizes and shapes that torch can handle."""
    try:
        layout = unpack_layout(found)
    except Rejected:
        return
    assert 0 < layout.size <= 2**48
    for spec in layout.tensors():
        assert torch.empty(spec.shape, dtype=spec.dtype, device="meta").numel() == spec.numel


sizes = st.integers(0, 4) | st.sampled_from([2**24, 2**31, 2**32, 2**48, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
specs = st.tuples(st.sampled_from(["", "a", "b", "a\nb", "ü"]), st.lists(sizes, max_size=4), st.integers(-1, 24))


@given(st.lists(specs, max_size=3), st.lists(specs, max_size=2))
@many
def test_any_layout_is_taken_or_refused(parameters, buffers):
    taken_or_refused(message(parameters, buffers))


@given(st.integers(0, 2**32))
@many
def test_any_damage_to_a_layout_is_taken_or_refused(seed):
    raw = mutate_bytes(layout_to_message(LAYOUT).SerializeToString(), random.Random(seed))
    taken_or_refused(pb.PackedLayout(fingerprint=LAYOUT.fingerprint, pieces=[zlib.compress(raw)]))


@pytest.mark.parametrize("shape", [[2**63, 0], [0, 2**64 - 1], [2**62, 2**62, 0]])
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_shape_that_no_tensor_has_is_refused_though_it_is_empty(shape, kind):
    bad, good = [("bad", shape, pb.DATA_TYPE_FLOAT32)], [("good", [2], pb.DATA_TYPE_FLOAT32)]
    found = message(good + bad) if kind == "parameter" else message(good, bad)
    with pytest.raises(Rejected, match="'bad'"):
        unpack_layout(found)


@pytest.mark.timeout(20)  # milliseconds do; the product of all of them takes minutes
def test_many_huge_dimensions_are_refused_without_multiplying_them_all():
    tensor = pb.TensorSpec(name="w", shape=[2**64 - 1] * 100_000, data_type=pb.DATA_TYPE_FLOAT32)
    found = packed(pb.ModelLayout(parameters=[tensor]), fingerprint=bytes(32))
    with pytest.raises(Rejected, match="impossible shape"):
        unpack_layout(found)


def test_a_model_far_larger_than_the_start_file_is_refused_without_allocating_it():
    """The first to join with --init says what the layout is; the file says what is there."""
    state = {"w": torch.zeros(2)}
    for shape in ((2**46,), (2**20, 2**26)):
        layout = ModelLayout((TensorSpec("w", shape, torch.float32),))
        assert layout.size == math.prod(shape)
        with pytest.raises(Rejected) as refused:
            fit(layout, state, with_buffers=False)
        assert refused.value.reason is ErrorCode.FINGERPRINT_MISMATCH
