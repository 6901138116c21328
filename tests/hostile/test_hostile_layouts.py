"""Layouts that lie: what a joining worker says of its model is refused before anything is allocated for it."""

import math
import random
import tracemalloc
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import ModelLayout, TensorSpec
from pscore.wire import layouts
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.layouts import layout_to_message, most_memory, unpack_layout, unpacked
from pscore.wire.messages import DATA_TYPES
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.durability.initial_model import fit
from tests.hostile.mutation import mutate_bytes
from tests.packed import packed
from tests.tiers import examples, long_but

many = settings(deadline=None, max_examples=examples(300))
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


# Pieces that lie


def forged(*pieces, fingerprint=b""):
    return pb.PackedLayout(fingerprint=fingerprint, pieces=pieces)


GOOD = zlib.compress(layout_to_message(LAYOUT).SerializeToString())
FEWER = 1 << 16  # tensors than the bound has, of which a test would make a million
TENSORS = pb.ModelLayout(parameters=[pb.TensorSpec(name="t", shape=[1], data_type=1)] * (FEWER // 16))
ALIASES = pb.ModelLayout(parameters=[pb.TensorSpec(name="t", shape=[1], data_type=1, aliases=["a"] * (1 << 18))])
FORGED = {
    "no bytes": (forged(b""), "cut"),
    "not compressed": (forged(layout_to_message(LAYOUT).SerializeToString()), "no compressed ModelLayout"),
    "a piece that is cut": (forged(GOOD[:-1]), "cut"),
    "a piece and more": (forged(GOOD + b"x"), "cut"),
    "no layout": (forged(zlib.compress(b"\xff" * 40)), "no compressed ModelLayout"),
    "a piece too large": (forged(zlib.compress(bytes((1 << 20) + 1))), "1048576 bytes"),
    "a bomb": (forged(zlib.compress(bytes(1 << 28), 9)), "1048576 bytes"),
    "bombs": (forged(*[zlib.compress(bytes(1 << 20), 9)] * 128), "no compressed ModelLayout"),
    "a piece too many": (forged(*[GOOD] * 129), "128 pieces, not 129"),
    "too many bytes": (forged(*[bytes(1 << 16)] * 61), "3932160 bytes once they are compressed, not 3997696"),
    "a tensor too many": (packed(*[TENSORS] * 16, layout_to_message(LAYOUT)), f"{FEWER} tensors"),
    "an alias too many": (packed(*[ALIASES] * 4, pb.ModelLayout(parameters=ALIASES.parameters)), "1048576 aliases"),
    "tensors of two bytes": (forged(*[zlib.compress(b"\n\0" * (1 << 19))] * 3), "1048576 tensors"),
}
LARGE = ("a tensor too many", "tensors of two bytes")  # seconds each


@pytest.mark.parametrize("what", long_but([what for what in FORGED if what not in LARGE], FORGED))
@pytest.mark.parametrize("read", [unpack_layout, unpacked])
def test_a_forged_layout_is_refused_within_memory_that_was_charged(what, read, monkeypatch):
    found, named = FORGED[what]
    if what == "a tensor too many":
        monkeypatch.setattr(layouts, "MOST_TENSORS", FEWER)
    tracemalloc.start()
    try:
        with pytest.raises(Rejected, match=named) as refused:
            read(found)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refused.value.reason is ErrorCode.BAD_REQUEST
    assert peak < most_memory(found)
    assert peak < 200 << 20


def test_tensors_are_counted_before_one_is_made(monkeypatch):
    def made(*_):
        raise AssertionError("a tensor is made although there are too many")

    monkeypatch.setattr(layouts, "MOST_TENSORS", FEWER)
    monkeypatch.setattr(layouts, "TensorSpec", made)
    monkeypatch.setattr(layouts, "tensor_name_fault", made)
    with pytest.raises(Rejected, match=f"{FEWER} tensors"):
        unpack_layout(packed(*[TENSORS] * 17))


@given(st.integers(0, 2**32))
@many
def test_any_damage_to_a_piece_is_taken_or_refused(seed):
    taken_or_refused(forged(mutate_bytes(GOOD, random.Random(seed)), fingerprint=LAYOUT.fingerprint))
