"""Translation between the proto's messages and data types, places of shards, and :mod:`pscore.model.ranges`."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from pscore.model.ranges import Ranges
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb

Places = TypeVar("Places")

LARGEST_RATE = 1e3
"""Of a param group of an optimizer on the server."""

LARGEST_LOSS = 1_000_000_000_000
"""That a worker may tell with a push, up and down."""

SHARD_HEADER = "sparseps-shard"
"""Metadata of a call: the shard that the call is for, as :func:`place_of` writes it."""

DATA_TYPES: dict[torch.dtype, "pb.DataType.ValueType"] = {
    getattr(torch, name.removeprefix("DATA_TYPE_").lower()): code
    for name, code in pb.DataType.items()
    if code != pb.DATA_TYPE_UNSPECIFIED
}
DTYPES = {code: dtype for dtype, code in DATA_TYPES.items()}

READER_DTYPES = (torch.float16, torch.bfloat16)
"""In which readers may hold the fp32 parameters of a run."""

MOST_ELEMENTS = 1 << 48
"""Of a model: beyond any; keeps a hostile shape from overflowing arithmetic."""


def place_of(index: int, num_shards: int) -> str:
    """Write which shard of how many."""
    return f"{index} of {num_shards}"


def type_to_message(dtype: torch.dtype | None) -> "pb.DataType.ValueType":
    """Write the data type in which readers hold fp32 parameters; ``None``: as the run has them."""
    return pb.DATA_TYPE_UNSPECIFIED if dtype is None else DATA_TYPES[dtype]


def type_from_message(code: int) -> torch.dtype | None:
    """Read what :func:`type_to_message` writes; raises :class:`Rejected` for other types than fp16 and bf16."""
    dtype: torch.dtype | None = DTYPES.get(code)  # type: ignore[call-overload]
    if code != pb.DATA_TYPE_UNSPECIFIED and dtype not in READER_DTYPES:
        raise Rejected(ErrorCode.BAD_REQUEST, f"readers hold parameters in FLOAT16 or BFLOAT16, and not in type {code}")
    return dtype


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
