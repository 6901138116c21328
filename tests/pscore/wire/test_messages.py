"""Layout messages: a layout survives the way, and a malformed one is refused by name."""

import pytest
import torch
from hypothesis import given, settings

from pscore.model.layout import BUFFER_DTYPES, FrozenTensor, ModelLayout, TensorSpec
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.layouts import layout_to_message, pack_layout, unpack_layout
from pscore.wire.messages import DATA_TYPES
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.packed import packed
from tests.pscore.core_makers import layouts
from tests.tiers import examples

LAYOUT = ModelLayout(
    (TensorSpec("w", (2, 3), torch.float32, ("tied.w",)), TensorSpec("b", (), torch.bfloat16)),
    tuple(TensorSpec(f"buffer{i}", (i,), dtype) for i, dtype in enumerate(BUFFER_DTYPES)),
    tuple(FrozenTensor(TensorSpec(f"frozen{i}", (i,), dtype), bytes(32)) for i, dtype in enumerate(DATA_TYPES)),
)


def over_the_wire(layout):
    return unpack_layout(pb.PackedLayout.FromString(pack_layout(layout).SerializeToString()))


@given(layouts().filter(lambda layout: layout.size))
@settings(deadline=None, max_examples=examples(80))
def test_a_layout_comes_back(layout):
    back = over_the_wire(layout)
    assert back == layout
    assert back.fingerprint == layout.fingerprint


def test_frozen_parameters_and_buffers_of_every_dtype_and_aliases_come_back():
    assert over_the_wire(LAYOUT) == LAYOUT


def test_every_data_type_of_the_protocol_is_in_the_table():
    assert {*DATA_TYPES.values()} == {*pb.DataType.values()} - {pb.DATA_TYPE_UNSPECIFIED}


def test_a_buffer_of_a_dtype_that_does_not_travel_is_named():
    with pytest.raises(ValueError, match="angles"):
        ModelLayout((), (TensorSpec("angles", (2,), torch.complex64),))


def broken(change):
    message, fingerprint = layout_to_message(LAYOUT), bytearray(LAYOUT.fingerprint)
    change(message, fingerprint)
    return packed(message, fingerprint=bytes(fingerprint))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m, fingerprint: fingerprint.reverse(), "fingerprint"),
        (lambda m, _: setattr(m.parameters[0], "data_type", 0), "'w'"),
        (lambda m, _: setattr(m.parameters[0], "data_type", 99), "'w'"),
        (lambda m, _: setattr(m.parameters[0], "data_type", pb.DATA_TYPE_FLOAT64), "parameter w"),
        (lambda m, _: setattr(m.buffers[0], "data_type", pb.DATA_TYPE_FLOAT8_E4M3FN), "buffer buffer0"),
        (lambda m, _: setattr(m.parameters[0], "name", ""), "no name"),
        (lambda m, _: setattr(m.parameters[1], "name", "w"), "'w' occurs twice"),
        (lambda m, _: m.parameters[0].shape.extend([1 << 40, 1 << 40]), "'w'"),
        (lambda m, _: m.ClearField("parameters"), "no parameters"),
    ],
)
def test_a_malformed_layout_is_refused_by_name(change, named):
    with pytest.raises(Rejected, match=named) as refused:
        unpack_layout(broken(change))
    assert refused.value.reason is ErrorCode.BAD_REQUEST
