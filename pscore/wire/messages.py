"""Translation between the proto's messages and :mod:`pscore.model.layout` and :mod:`pscore.model.ranges`."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from pscore.model.layout import FrozenTensor, ModelLayout, TensorSpec
from pscore.model.ranges import Ranges
from pscore.names import shown, tensor_name_fault
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb

Places = TypeVar("Places")

PROTOCOL_VERSION = 2

LARGEST_RATE = 1e3
"""Of a param group of an optimizer on the server."""

SHARD_HEADER = "sparseps-shard"
"""Metadata of a call: the shard that the call is for, as :func:`place_of` writes it."""

DATA_TYPES: dict[torch.dtype, "pb.DataType.ValueType"] = {
    getattr(torch, name.removeprefix("DATA_TYPE_").lower()): code
    for name, code in pb.DataType.items()
    if code != pb.DATA_TYPE_UNSPECIFIED
}
_DTYPES = {code: dtype for dtype, code in DATA_TYPES.items()}

READER_DTYPES = (torch.float16, torch.bfloat16)
"""In which readers may hold the fp32 parameters of a run."""

MOST_ELEMENTS = 1 << 48
"""Of a model: beyond any; keeps a hostile shape from overflowing arithmetic."""

MOST_TENSORS = 1 << 16
"""Parameters and buffers of a model together; their aliases together are at most as many."""

_MAX_DIMENSIONS = 64  # torch's own limit


def place_of(index: int, num_shards: int) -> str:
    """Write which shard of how many."""
    return f"{index} of {num_shards}"


def type_to_message(dtype: torch.dtype | None) -> "pb.DataType.ValueType":
    """Write the data type in which readers hold fp32 parameters; ``None``: as the run has them."""
    return pb.DATA_TYPE_UNSPECIFIED if dtype is None else DATA_TYPES[dtype]


def type_from_message(code: int) -> torch.dtype | None:
    """Read what :func:`type_to_message` writes; raises :class:`Rejected` for other types than fp16 and bf16."""
    dtype: torch.dtype | None = _DTYPES.get(code)  # type: ignore[call-overload]
    if code != pb.DATA_TYPE_UNSPECIFIED and dtype not in READER_DTYPES:
        raise Rejected(ErrorCode.BAD_REQUEST, f"readers hold parameters in FLOAT16 or BFLOAT16, and not in type {code}")
    return dtype


def layout_to_message(layout: ModelLayout) -> pb.ModelLayout:
    """Write a layout with its fingerprint; all dtypes must be in :data:`DATA_TYPES`."""

    def write(spec: TensorSpec) -> pb.TensorSpec:
        return pb.TensorSpec(name=spec.name, shape=spec.shape, data_type=DATA_TYPES[spec.dtype], aliases=spec.aliases)

    return pb.ModelLayout(
        parameters=[write(spec) for spec in layout.parameters],
        buffers=[write(spec) for spec in layout.buffers],
        fingerprint=layout.fingerprint,
        frozen=[pb.FrozenTensor(spec=write(each.spec), digest=each.digest) for each in layout.frozen],
        word_bytes=layout.word_bytes,
    )


def layout_from_message(message: pb.ModelLayout) -> ModelLayout:
    """Read a peer's layout; raises :class:`Rejected` (``BAD_REQUEST``), naming the tensor that is malformed.

    The names and the stated fingerprint are checked too.
    """
    specs = [*message.parameters, *message.buffers, *(each.spec for each in message.frozen)]
    for what, count in (("tensors", len(specs)), ("aliases", sum(len(spec.aliases) for spec in specs))):
        if count > MOST_TENSORS:
            raise Rejected(ErrorCode.BAD_REQUEST, f"a model has at most {MOST_TENSORS} {what}, not {count}")
    for spec in specs:
        for name in (spec.name, *spec.aliases):
            if fault := tensor_name_fault(name):
                raise Rejected(ErrorCode.BAD_REQUEST, fault)
    layout = kept_layout_from_message(message)
    if layout.fingerprint != message.fingerprint:
        raise Rejected(ErrorCode.BAD_REQUEST, "the layout does not have the fingerprint that it states")
    return layout


def kept_layout_from_message(message: pb.ModelLayout) -> ModelLayout:
    """As :func:`layout_from_message`, for a layout that an older release may have written, with names it allowed."""
    try:
        layout = ModelLayout(
            tuple(map(_spec_from_message, message.parameters)),
            tuple(map(_spec_from_message, message.buffers)),
            tuple(FrozenTensor(_spec_from_message(each.spec), each.digest) for each in message.frozen),
            message.word_bytes,
        )
    except ValueError as error:
        raise Rejected(ErrorCode.BAD_REQUEST, str(error)) from error
    if layout.size == 0:
        raise Rejected(ErrorCode.BAD_REQUEST, "the model has no parameters")
    if layout.size > MOST_ELEMENTS:
        raise Rejected(ErrorCode.BAD_REQUEST, f"a model of {layout.size} parameters is beyond what can be served")
    return layout


def _spec_from_message(spec: pb.TensorSpec) -> TensorSpec:
    dtype = _DTYPES.get(spec.data_type)
    if dtype is None:
        raise Rejected(ErrorCode.BAD_REQUEST, f"tensor {shown(spec.name)!r} has unknown data type {spec.data_type}")
    sizes = tuple(spec.shape[: _MAX_DIMENSIONS + 1])  # bounded before anything is multiplied
    if len(sizes) > _MAX_DIMENSIONS or math.prod(max(1, size) for size in sizes) > MOST_ELEMENTS:
        raise Rejected(ErrorCode.BAD_REQUEST, f"tensor {shown(spec.name)!r} has an impossible shape")
    return TensorSpec(spec.name, sizes, dtype, tuple(spec.aliases))


def first_difference(ours: pb.ModelLayout, theirs: pb.ModelLayout) -> tuple[str, str] | None:
    """Return the name of the first tensor in which ``theirs`` differs, and how; ``None`` if none does.

    The messages are compared up to that tensor and not converted, so a hostile ``theirs`` costs nothing more.
    """
    if bool(ours.word_bytes) != bool(theirs.word_bytes):
        run, worker = ("is a feed", "trains") if ours.word_bytes else ("trains a model", "publishes")
        return "", f"the run {run}, and this worker {worker}: name another server"
    for kind, mine, yours in (
        ("parameter", ours.parameters, theirs.parameters),
        ("buffer", ours.buffers, theirs.buffers),
        ("frozen parameter", [each.spec for each in ours.frozen], [each.spec for each in theirs.frozen]),
    ):
        for one, other in zip(mine, yours, strict=False):
            if one == other:
                continue
            if (one.name, one.data_type) != (other.name, other.data_type) or one.shape != other.shape:
                how = f"{kind} {_described(other)} stands where the run has {_described(one)}"
                return _frozen_on_one_side(ours, theirs, one, other) or (shown(other.name), how)
        if len(mine) != len(yours):
            longer, which = (mine, "lacks") if len(mine) > len(yours) else (yours, "has in addition")
            extra = longer[min(len(mine), len(yours))]
            how = f"the worker {which} {kind} {_described(extra)}"
            return _frozen_on_one_side(ours, theirs, extra, extra) or (shown(extra.name), how)
    for known, stated in zip(ours.frozen, theirs.frozen, strict=True):
        if known.digest != stated.digest:
            return shown(stated.spec.name), (
                f"frozen parameter {_described(stated.spec)} has other values than the run's: load the same weights "
                "before the optimizer is made, or set upload_frozen (PSCLIENT_UPLOAD_FROZEN) on all workers"
            )
    if ours.word_bytes != theirs.word_bytes:
        return "", f"words of {theirs.word_bytes} bytes; the feed has words of {ours.word_bytes}"
    return None


def _frozen_on_one_side(
    ours: pb.ModelLayout, theirs: pb.ModelLayout, stored: pb.TensorSpec, brought: pb.TensorSpec
) -> tuple[str, str] | None:
    """Return the name of a tensor that only one side has frozen, and what to do; ``None`` if there is none."""
    if any(each.spec.name == stored.name for each in theirs.frozen):
        spec, where = stored, "frozen in this worker and stored by the run"
    elif any(each.spec.name == brought.name for each in ours.frozen):
        spec, where = brought, "frozen in the run and not in this worker"
    else:
        return None
    return shown(spec.name), (
        f"parameter {_described(spec)} is {where}: set requires_grad before the optimizer is made, and upload_frozen "
        "(PSCLIENT_UPLOAD_FROZEN), alike on all workers; a run that stores frozen parameters needs upload_frozen=True"
    )


def _described(spec: pb.TensorSpec) -> str:
    sizes = list(spec.shape[:_MAX_DIMENSIONS])
    dtype = str(_DTYPES.get(spec.data_type, spec.data_type)).removeprefix("torch.")
    return f"{shown(spec.name)} {sizes} {dtype}"


def share_to_messages(share: Mapping[int, Ranges]) -> list[pb.SampleRange]:
    """Write places of a dataset by epoch, oldest epoch first."""
    return share_as(pb.SampleRange, share)


def share_as(kind: Callable[..., Places], share: Mapping[int, Ranges]) -> list[Places]:
    """Write places of a dataset as :func:`share_to_messages`, in messages of another kind with the same names."""
    return [
        kind(epoch=epoch, start=start, count=end - start)
        for epoch, ranges in sorted(share.items())
        for start, end in ranges
    ]


def share_from_messages(messages: Iterable[Any]) -> dict[int, Ranges]:
    """Read places that :func:`share_to_messages` has written; the caller refuses places out of bounds."""
    pairs: dict[int, list[tuple[int, int]]] = {}
    for each in messages:
        pairs.setdefault(each.epoch, []).append((each.start, each.start + each.count))
    return {epoch: Ranges(found) for epoch, found in pairs.items()}
