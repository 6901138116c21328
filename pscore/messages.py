"""Translation between the proto's messages and :mod:`pscore.layout` and :mod:`pscore.ranges`."""

import math
from collections.abc import Mapping

import torch

from pscore.layout import ModelLayout, TensorSpec
from pscore.ranges import Ranges
from pscore.reasons import Reason, Refusal
from pscore.v1 import parameter_server_pb2 as pb

PROTOCOL_VERSION = 1

SHARD_HEADER = "sparseps-shard"
"""Metadata of a call: the shard that the caller takes the server for, as :func:`place_of` writes it."""

DATA_TYPES: dict[torch.dtype, "pb.DataType.ValueType"] = {
    torch.float32: pb.DATA_TYPE_FLOAT32,
    torch.float16: pb.DATA_TYPE_FLOAT16,
    torch.bfloat16: pb.DATA_TYPE_BFLOAT16,
    torch.float64: pb.DATA_TYPE_FLOAT64,
    torch.int64: pb.DATA_TYPE_INT64,
    torch.int32: pb.DATA_TYPE_INT32,
    torch.int16: pb.DATA_TYPE_INT16,
    torch.int8: pb.DATA_TYPE_INT8,
    torch.uint8: pb.DATA_TYPE_UINT8,
    torch.bool: pb.DATA_TYPE_BOOL,
}
_DTYPES = {code: dtype for dtype, code in DATA_TYPES.items()}

_MAX_DIMENSIONS = 64  # torch's own limit
_MAX_ELEMENTS = 1 << 48  # beyond any model; keeps a hostile shape from overflowing arithmetic


def place_of(index: int, num_shards: int) -> str:
    """Write which shard of how many."""
    return f"{index} of {num_shards}"


def layout_to_message(layout: ModelLayout) -> pb.ModelLayout:
    """Write a layout with its fingerprint.

    Raises:
        ValueError: a buffer has a dtype that the protocol cannot carry.
    """

    def write(spec: TensorSpec) -> pb.TensorSpec:
        if spec.dtype not in DATA_TYPES:
            raise ValueError(f"buffer {spec.describe()}: this dtype cannot be sent; register it as non-persistent")
        return pb.TensorSpec(name=spec.name, shape=spec.shape, data_type=DATA_TYPES[spec.dtype], aliases=spec.aliases)

    return pb.ModelLayout(
        parameters=[write(spec) for spec in layout.parameters],
        buffers=[write(spec) for spec in layout.buffers],
        fingerprint=layout.fingerprint,
    )


def layout_from_message(message: pb.ModelLayout) -> ModelLayout:
    """Read a layout and check it against its own fingerprint.

    Raises:
        Refusal: ``BAD_REQUEST``, saying which tensor is malformed.
    """

    def read(spec: pb.TensorSpec) -> TensorSpec:
        dtype = _DTYPES.get(spec.data_type)
        if dtype is None:
            raise Refusal(Reason.BAD_REQUEST, f"tensor {spec.name!r} has unknown data type {spec.data_type}")
        sizes = list(spec.shape[: _MAX_DIMENSIONS + 1])  # bounded before anything is multiplied
        if len(sizes) > _MAX_DIMENSIONS or any(size > _MAX_ELEMENTS for size in sizes):
            raise Refusal(Reason.BAD_REQUEST, f"tensor {spec.name!r} has an impossible shape")
        if not spec.name or math.prod(max(1, size) for size in sizes) > _MAX_ELEMENTS:
            raise Refusal(Reason.BAD_REQUEST, f"tensor {spec.name!r} has no name or an impossible shape")
        return TensorSpec(spec.name, tuple(spec.shape), dtype, tuple(spec.aliases))

    try:
        layout = ModelLayout(
            tuple(read(spec) for spec in message.parameters), tuple(read(spec) for spec in message.buffers)
        )
    except ValueError as error:
        raise Refusal(Reason.BAD_REQUEST, str(error)) from error
    if layout.size == 0:
        raise Refusal(Reason.BAD_REQUEST, "the model has no parameters")
    if layout.size > _MAX_ELEMENTS:
        raise Refusal(Reason.BAD_REQUEST, f"a model of {layout.size} parameters is beyond what can be served")
    if layout.fingerprint != message.fingerprint:
        raise Refusal(Reason.BAD_REQUEST, "the layout does not have the fingerprint that it states")
    return layout


def share_to_messages(share: Mapping[int, Ranges]) -> list[pb.SampleRange]:
    """Write places of a dataset by epoch, oldest epoch first."""
    return [
        pb.SampleRange(epoch=epoch, start=start, count=end - start)
        for epoch, ranges in sorted(share.items())
        for start, end in ranges
    ]
