"""Layouts as they travel: packed into one message, and read piece by piece.

The names of experts repeat one another: compressed, a tensor takes some three bytes, and a million tensors fit into one
message. A piece is bounded before it is compressed, so a reader checks each before it inflates the next.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError

from pscore.model.layout import FrozenTensor, ModelLayout, TensorSpec
from pscore.names import LONGEST_TENSOR_NAME, RESERVED_TENSOR_NAME, shown, tensor_name_fault
from pscore.wire.dense import count_fields
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.messages import DATA_TYPES, DTYPES, MOST_ELEMENTS
from pscore.wire.v1 import parameter_server_pb2 as pb

Made = TypeVar("Made")

MOST_TENSORS = 1 << 20
"""Parameters, buffers and frozen parameters of a model together; their aliases together are at most as many."""

PIECE_BYTES = 1 << 20
"""Of a piece before it is compressed."""

MOST_PIECES = 128
"""Of a layout: for tensors of a hundred and twenty bytes each, which are all but the name few."""

MOST_PACKED_BYTES = (4 << 20) - (256 << 10)
"""Of the pieces together: gRPC's limit of a message, without what the message has beside them."""

_MAX_DIMENSIONS = 64  # torch's own limit
_FIELD_BYTES, _SPEC_BYTES = 8, 32  # at most: around a text, and of a tensor beside its texts and sizes
_PIECE_MEMORY = 64 << 20  # of a piece at most, as messages and objects: tensors may have two bytes
_TENSOR_MEMORY = 640  # of a tensor with an alias, as objects: 340 to 430 were measured
_NO_PIECE = "a piece of the layout is no compressed ModelLayout"
_LEVEL = 9  # of zlib: half as long again as the default, for two per cent less


def pack_layout(layout: ModelLayout) -> pb.PackedLayout:
    """Pack a layout with its fingerprint; all dtypes must be in :data:`pscore.wire.messages.DATA_TYPES`.

    Raises :class:`Rejected` (``BAD_REQUEST``) if it is beyond what a server takes.
    """
    pieces = [zlib.compress(piece.SerializeToString(), _LEVEL) for piece in _cut(layout)]
    packed = pb.PackedLayout(fingerprint=layout.fingerprint, pieces=pieces)
    require_few_pieces(packed)
    return packed


def require_few_pieces(packed: pb.PackedLayout) -> None:
    """Check what can be checked before anything is inflated; raises :class:`Rejected` (``BAD_REQUEST``)."""
    if len(packed.pieces) > MOST_PIECES:
        raise Rejected(ErrorCode.BAD_REQUEST, f"a layout has at most {MOST_PIECES} pieces, not {len(packed.pieces)}")
    if (nbytes := sum(map(len, packed.pieces))) > MOST_PACKED_BYTES:
        raise Rejected(
            ErrorCode.BAD_REQUEST,
            f"the names, shapes and digests of a model's tensors have at most {MOST_PACKED_BYTES} bytes once they are "
            f"compressed, not {nbytes}",
        )


def most_memory(packed: pb.PackedLayout) -> int:
    """Return more bytes than a layout may occupy while, and after, it is unpacked."""
    pieces = len(packed.pieces)
    return min(pieces * _PIECE_MEMORY, MOST_TENSORS * _TENSOR_MEMORY + _PIECE_MEMORY + 4 * pieces * PIECE_BYTES)


def unpack_layout(packed: pb.PackedLayout) -> ModelLayout:
    """Read a peer's layout; raises :class:`Rejected` (``BAD_REQUEST``), naming the tensor that is malformed.

    The names and the stated fingerprint are checked too.
    """
    parameters, buffers, frozen, word_bytes = list[TensorSpec](), list[TensorSpec](), list[FrozenTensor](), 0
    for piece, specs in _counted(packed):
        _require_names(specs)
        parameters += map(_spec_from_message, piece.parameters)
        buffers += map(_spec_from_message, piece.buffers)
        frozen += map(_frozen_from_message, piece.frozen)
        word_bytes = piece.word_bytes or word_bytes
    layout = _made(parameters, buffers, frozen, word_bytes)
    if layout.fingerprint != packed.fingerprint:
        raise Rejected(ErrorCode.BAD_REQUEST, "the layout does not have the fingerprint that it states")
    return layout


def unpacked(packed: pb.PackedLayout) -> pb.ModelLayout:
    """Return the pieces merged, for :func:`first_difference`; of the tensors only the number is checked.

    Raises :class:`Rejected` (``BAD_REQUEST``).
    """
    whole = pb.ModelLayout()
    for piece, _ in _counted(packed):
        whole.MergeFrom(piece)
    return whole


def _counted(packed: pb.PackedLayout) -> Iterator[tuple[pb.ModelLayout, list[pb.TensorSpec]]]:
    """Yield the pieces, each with its tensors, once it is known that these are not too many.

    A piece of many tensors occupies ten times its bytes once it is parsed, so they are counted before that.
    """
    require_few_pieces(packed)
    left = MOST_TENSORS + len(packed.pieces)  # a tensor is one field, and a piece may have the size of words beside
    for data in packed.pieces:
        raw = _inflated(data)
        left -= count_fields(raw, 0, len(raw), left)
        _require_few(MOST_TENSORS - left, "tensors")
    tensors = aliases = 0
    for data in packed.pieces:
        piece = _parsed(_inflated(data))
        specs = [*piece.parameters, *piece.buffers, *(each.spec for each in piece.frozen)]
        tensors += len(specs)
        aliases += sum([len(spec.aliases) for spec in specs])
        _require_few(tensors, "tensors")
        _require_few(aliases, "aliases")
        yield piece, specs


def _inflated(data: bytes) -> bytes:
    """Return the bytes of a piece, within its bound."""
    inflating = zlib.decompressobj()
    try:
        raw = inflating.decompress(data, PIECE_BYTES + 1)
    except zlib.error as error:
        raise Rejected(ErrorCode.BAD_REQUEST, _NO_PIECE) from error
    if not inflating.eof or inflating.unused_data or len(raw) > PIECE_BYTES:
        raise Rejected(ErrorCode.BAD_REQUEST, f"a piece of the layout is cut, or has more than {PIECE_BYTES} bytes")
    return raw


def _parsed(raw: bytes) -> pb.ModelLayout:
    try:
        return pb.ModelLayout.FromString(raw)
    except DecodeError as error:
        raise Rejected(ErrorCode.BAD_REQUEST, _NO_PIECE) from error


def _require_few(count: int, what: str) -> None:
    if count > MOST_TENSORS:
        raise Rejected(ErrorCode.BAD_REQUEST, f"a model has at most {MOST_TENSORS} {what}, not {count} or more")


def _require_names(specs: Iterable[pb.TensorSpec]) -> None:
    """Check names and aliases: all at once, and if one has a fault one by one."""
    names = [spec.name for spec in specs]
    for spec in specs:
        if spec.aliases:
            names += spec.aliases
    is_good = all(names) and RESERVED_TENSOR_NAME not in names and "".join(names).isprintable()
    if is_good and max(map(len, names), default=0) <= LONGEST_TENSOR_NAME:
        return
    for name in names:
        if fault := tensor_name_fault(name):
            raise Rejected(ErrorCode.BAD_REQUEST, fault)


def _cut(layout: ModelLayout) -> Iterator[pb.ModelLayout]:
    """Yield messages that merged are the layout, each within :data:`PIECE_BYTES`; raises :class:`Rejected`."""
    _require_few(len(layout.parameters) + len(layout.buffers) + len(layout.frozen), "tensors")
    _require_few(sum([len(spec.aliases) for spec in layout.tensors()]), "aliases")
    piece, left = pb.ModelLayout(word_bytes=layout.word_bytes), PIECE_BYTES - _FIELD_BYTES

    def room_for(spec: TensorSpec, more: int = 0) -> Iterator[pb.ModelLayout]:
        """Yield the piece if the next tensor has no place in it, and begin another."""
        nonlocal piece, left
        names = len(spec.name.encode()) + sum([len(alias.encode()) + _FIELD_BYTES for alias in spec.aliases])
        nbytes = names + sum([size.bit_length() // 7 + 1 for size in spec.shape]) + _SPEC_BYTES + more
        if nbytes > left:
            yield piece
            piece, left = pb.ModelLayout(), PIECE_BYTES
        if nbytes > left:
            raise Rejected(ErrorCode.BAD_REQUEST, f"tensor {shown(spec.name)!r} has too many aliases")
        left -= nbytes

    for spec in layout.parameters:
        yield from room_for(spec)
        _write(spec, piece.parameters.add())
    for spec in layout.buffers:
        yield from room_for(spec)
        _write(spec, piece.buffers.add())
    for tensor in layout.frozen:
        yield from room_for(tensor.spec, len(tensor.digest))
        _write(tensor.spec, piece.frozen.add(digest=tensor.digest).spec)
    yield piece


def _write(spec: TensorSpec, message: pb.TensorSpec) -> None:
    message.name, message.data_type = spec.name, DATA_TYPES[spec.dtype]
    message.shape.extend(spec.shape)
    if spec.aliases:
        message.aliases.extend(spec.aliases)


def layout_to_message(layout: ModelLayout) -> pb.ModelLayout:
    """Write a layout for a file of the server."""
    whole = pb.ModelLayout()
    for piece in _cut(layout):
        whole.MergeFrom(piece)
    return whole


def kept_layout_from_message(message: pb.ModelLayout) -> ModelLayout:
    """Read what :func:`layout_to_message` writes, or an older release has written, with names that it allowed."""
    parameters, buffers = map(_spec_from_message, message.parameters), map(_spec_from_message, message.buffers)
    return _made(parameters, buffers, map(_frozen_from_message, message.frozen), message.word_bytes)


def _made(
    parameters: Iterable[TensorSpec], buffers: Iterable[TensorSpec], frozen: Iterable[FrozenTensor], word_bytes: int
) -> ModelLayout:
    try:
        layout = ModelLayout(tuple(parameters), tuple(buffers), tuple(frozen), word_bytes)
    except ValueError as error:
        raise Rejected(ErrorCode.BAD_REQUEST, str(error)) from error
    if layout.size == 0:
        raise Rejected(ErrorCode.BAD_REQUEST, "the model has no parameters")
    if layout.size > MOST_ELEMENTS:
        raise Rejected(ErrorCode.BAD_REQUEST, f"a model of {layout.size} parameters is beyond what can be served")
    return layout


def _spec_from_message(spec: pb.TensorSpec) -> TensorSpec:
    dtype = DTYPES.get(spec.data_type)
    if dtype is None:
        raise Rejected(ErrorCode.BAD_REQUEST, f"tensor {shown(spec.name)!r} has unknown data type {spec.data_type}")
    sizes = tuple(spec.shape[: _MAX_DIMENSIONS + 1])  # bounded before anything is multiplied
    is_odd = len(sizes) > _MAX_DIMENSIONS or math.prod(sizes) > MOST_ELEMENTS
    if is_odd or (0 in sizes and math.prod(max(1, size) for size in sizes) > MOST_ELEMENTS):
        raise Rejected(ErrorCode.BAD_REQUEST, f"tensor {shown(spec.name)!r} has an impossible shape")
    return TensorSpec(spec.name, sizes, dtype, tuple(spec.aliases))


def _frozen_from_message(frozen: pb.FrozenTensor) -> FrozenTensor:
    return FrozenTensor(_spec_from_message(frozen.spec), frozen.digest)


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
    dtype = str(DTYPES.get(spec.data_type, spec.data_type)).removeprefix("torch.")
    return f"{shown(spec.name)} {sizes} {dtype}"


class OncePerLayout(Generic[Made]):
    """Makes something of a run's layout once, however often it is asked for."""

    def __init__(self, make: Callable[[ModelLayout], Made]) -> None:
        self._make = make
        self._known: tuple[ModelLayout, Made] | None = None

    def __call__(self, layout: ModelLayout) -> Made:
        """Return it."""
        known = self._known
        if known is None or known[0] is not layout:
            known = self._known = layout, self._make(layout)
        return known[1]
