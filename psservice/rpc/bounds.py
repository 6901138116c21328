"""Checks of the numbers, names and lists of a request, made once for every call before its handler runs.

:data:`BOUNDS` has every 64-bit number of a request but for those that the shard compares with its own state;
docs/reference/protocol.md, *Bounds*, lists both. Sums stay within 64 bits: a run's samples end at
:data:`psservice.state.run.MOST_COUNT`, and the shard bounds the first version of a model and the steps of WAGMA.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from google.protobuf.message import Message

from pscore.names import LONGEST_NAME
from pscore.wire.dense import count_fields, fields
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.histories import MOST_ORIGINS
from pscore.wire.layouts import require_few_pieces
from pscore.wire.messages import LARGEST_LOSS, LARGEST_RATE, MOST_ELEMENTS
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.data_leases.dataset import MOST_EPOCHS, MOST_SAMPLES, MOST_SIZE
from psservice.feed.relaying import MOST_RELAYS
from psservice.storage.journal_format import MARK_BYTES
from psservice.values import require_name

_WAIT = (0.0, 3600.0)  # seconds of one call; a worker that waits longer calls again
_LONGEST_BAN_SECONDS = 7 * 24 * 3600.0
_MOST_VERSION = _MOST_STEP = 1 << 53  # exact as a double too: metrics, JSON
_MOST_GENERATION = (3 << 62) - 1  # an epoch of 3·2^30: a thousand million uploads above what a worker may tell of
_MOST_PUSH_SAMPLES = 1 << 32
_LARGEST_PUSH_RATE = 1e9
_MOST_BYTES = 1 << 62  # of a journal, and segments
_FASTEST_LINK = 1e15  # bytes a second
_MOST_A_SECOND = 1_000_000_000

BOUNDS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "RenewLeaseRequest": {"uploaded": (0.0, 1.0), "wait_seconds": _WAIT},
    "ShardHistory": {
        "generation": (0, _MOST_GENERATION),
        "version": (0, _MOST_VERSION),
        "lost_versions": (0, _MOST_VERSION),
    },
    "ShardOrigin": {"generation": (0, _MOST_GENERATION), "version": (0, _MOST_VERSION)},
    "JoinRequest": {"generation_seen": (0, _MOST_GENERATION), "wait_seconds": _WAIT},
    "UploadHeader": {"generation": (0, _MOST_GENERATION), "version": (0, _MOST_VERSION)},
    "PushHeader": {
        "step": (1, _MOST_STEP),
        "generation": (0, _MOST_GENERATION),
        "base_version": (0, _MOST_VERSION),
        "samples": (0, _MOST_PUSH_SAMPLES),
        "learning_rate": (0.0, _LARGEST_PUSH_RATE),
        "group_rates": (0.0, LARGEST_RATE),
        "wait_seconds": _WAIT,
        "loss": (-LARGEST_LOSS, LARGEST_LOSS),
    },
    "PullDiffRequest": {
        "generation": (0, _MOST_GENERATION),
        "base_version": (0, _MOST_VERSION),
        "acknowledged_reply": (0, _MOST_VERSION),
        "after_step": (0, _MOST_STEP),
        "link_bytes_per_second": (0.0, _FASTEST_LINK),
        "density": (0.0, 1.0),
        "wait_seconds": _WAIT,
    },
    "BuffersHeader": {
        "step": (0, _MOST_STEP),
        "generation": (0, _MOST_GENERATION),
        "samples": (0, _MOST_PUSH_SAMPLES),
    },
    "LeaseSamplesRequest": {
        "size": (1, MOST_SIZE),
        "seed": (0, (1 << 64) - 1),
        "epoch": (0, MOST_EPOCHS - 1),
        "samples": (0, MOST_SAMPLES),
        "wait_seconds": _WAIT,
    },
    "WaitForAllRequest": {"number": (1, _MOST_STEP), "wait_seconds": _WAIT},
    "PublishRequest": {"generation": (0, _MOST_GENERATION), "version": (1, _MOST_VERSION)},
    "FollowRunRequest": {"known": (0, (1 << 64) - 1), "wait_seconds": _WAIT, "cut": (0, (1 << 64) - 1)},
    "ShardProgress": {
        "version": (0, _MOST_VERSION),
        "pushes_per_second": (0.0, _MOST_A_SECOND),
        "push_bytes_per_second": (0.0, _FASTEST_LINK),
        "pull_bytes_per_second": (0.0, _FASTEST_LINK),
        "staleness_median": (0.0, _MOST_VERSION),
        "staleness_largest": (0, _MOST_VERSION),
        "age_seconds": (0.0, 0.0),
    },
    "ShardVersion": {"generation": (0, _MOST_GENERATION), "version": (0, _MOST_VERSION)},
    "AwaitCutRequest": {"wait_seconds": _WAIT, "version": (0, _MOST_VERSION)},
    "ReadCutRequest": {"link_bytes_per_second": (0.0, _FASTEST_LINK)},
    "HeldPart": {"end": (1, MOST_ELEMENTS), "version": (0, _MOST_VERSION)},
    "RestoreModelRequest": {"version": (0, _MOST_VERSION)},
    "ReplicateRequest": {
        "segment": (0, _MOST_BYTES),
        "offset": (0, _MOST_BYTES),
        "generation": (0, _MOST_GENERATION),
        "wait_seconds": _WAIT,
    },
    "EvictWorkerRequest": {"ban_seconds": (0.0, _LONGEST_BAN_SECONDS)},
}
"""By message and field: the least and the largest value."""

_DIGEST_BYTES = 32
_MOST_SETTINGS = 256
_LONGEST_SETTING = 512 << 10  # the positions of all tensors, in groups of an optimizer
_MOST_CODECS = 64
_MOST_SHARDS = 4096
_MOST_RELAYED = 2  # the published and the staged cut
_MOST_HELD = 2  # parts of a shard: the beginning that came of a transfer, and the rest
_MOST_FIELDS = 8192  # of one message
_MOST_INNER_FIELDS = (64 << 10) + 1  # of one in it: a header has the groups of a plan

_NAMES: Mapping[str, Mapping[str, bool]] = {
    "WorkerIdentity": {"worker_id": False, "incarnation": False, "run_id": True},
    "JoinRequest": {"method": False, "release": True},
    "ShardOrigin": {"checkpoint": True},
    "FinishRunRequest": {"run_id": True},
    "TakeSnapshotRequest": {"checkpoint": True},
    "PinCheckpointRequest": {"checkpoint": False},
    "DeleteCheckpointRequest": {"checkpoint": False},
    "ReadCheckpointRequest": {"checkpoint": False},
    "FollowRunRequest": {"publication": True, "not_relayed": True},
    "RestoreModelRequest": {"checkpoint": True, "ticket": True, "publication": True},
    "EvictWorkerRequest": {"worker_id": False},
    "AwaitCutRequest": {"reader": True},
    "ReplicateRequest": {"standby": False},
}
"""By message and field: whether the name may be empty."""


def require(message: Message) -> None:
    """Check a request, or a message of a stream, with its header and identity; raises :class:`Rejected`."""
    numbers, names, lists, inner = _checks(message.__class__.__name__)
    for field, least, most, is_list in numbers:
        found = getattr(message, field)
        for value in found if is_list else (found,):
            if not least <= value <= most:  # so that what is not a number is refused too
                raise Rejected(ErrorCode.BAD_REQUEST, f"{field} is {value}; it must be {least} to {most}")
    for field, may_be_empty in names:
        text = getattr(message, field)
        if not (may_be_empty if not text else len(text) <= LONGEST_NAME and text.isprintable()):
            require_name(field, text)
    if lists is not None:
        lists(message)
    for field, is_optional in inner:
        if not is_optional or message.HasField(field):
            require(getattr(message, field))


@cache
def _checks(name: str) -> tuple[Any, ...]:
    """Return numbers, names, check of lists, and inner messages of a kind: descriptors are slow to read."""
    fields = pb.DESCRIPTOR.message_types_by_name[name].fields_by_name
    numbers = [(field, *bound, fields[field].is_repeated) for field, bound in BOUNDS.get(name, {}).items()]
    inner = [(field, field == "header") for field in ("identity", "header") if field in fields]
    return numbers, [*_NAMES.get(name, {}).items()], _LISTS.get(name), inner


def _require_join(request: pb.JoinRequest) -> None:
    """Check the lists of a joining worker; its tensors are unpacked only if the run has others."""
    require_few_pieces(request.layout)
    for what, count, most in (
        ("settings", len(request.method_settings), _MOST_SETTINGS),
        ("index codecs", len(request.index_codecs), _MOST_CODECS),
        ("value codecs", len(request.value_codecs), _MOST_CODECS),
    ):
        if count > most:
            raise Rejected(ErrorCode.BAD_REQUEST, f"a worker joins with at most {most} {what}, not {count}")
    if request.HasField("loaded"):
        _require_digest(request.loaded.digest)
    for name, value in request.method_settings.items():
        require_name("the name of a setting", name)
        if value:
            require_name(f"setting {name!r}", value, _LONGEST_SETTING)


def _require_renewal(request: pb.RenewLeaseRequest) -> None:
    if len(request.shards) > _MOST_SHARDS:
        raise Rejected(ErrorCode.BAD_REQUEST, f"a worker tells of at most {_MOST_SHARDS} shards")
    for history in request.shards:
        _require_history(history)


def _require_history(history: pb.ShardHistory) -> None:
    if len(history.origins) > MOST_ORIGINS:
        raise Rejected(ErrorCode.BAD_REQUEST, f"a shard has at most {MOST_ORIGINS} origins")
    for message in (history, *history.origins):
        require(message)


def _require_replication(request: pb.ReplicateRequest) -> None:
    if len(request.mark) not in (0, MARK_BYTES):
        raise Rejected(ErrorCode.BAD_REQUEST, f"the mark of a segment has {MARK_BYTES} bytes")
    if request.HasField("successor"):
        _require_history(request.successor)


def _require_digest(digest: bytes) -> None:
    if len(digest) != _DIGEST_BYTES:
        raise Rejected(ErrorCode.BAD_REQUEST, f"a model's digest has {len(digest)} bytes; it must have {_DIGEST_BYTES}")


def _require_cut_question(request: pb.AwaitCutRequest) -> None:
    if len(request.known) > _MOST_SHARDS:
        raise Rejected(ErrorCode.BAD_REQUEST, f"a cut has at most {_MOST_SHARDS} shards")
    for version in request.known:
        require(version)
    if len(request.relays) > MOST_RELAYS:
        raise Rejected(ErrorCode.BAD_REQUEST, f"at most {MOST_RELAYS} relays wait for an answer")
    for name in request.relays:
        require_name("relays", name)


def _require_read(request: pb.ReadCutRequest) -> None:
    if len(request.held) > _MOST_HELD or len(request.index_codecs) > _MOST_CODECS:
        raise Rejected(ErrorCode.BAD_REQUEST, f"a reader tells of at most {_MOST_HELD} parts and {_MOST_CODECS} codecs")
    for part in (request.version, *request.held):
        require(part)


def _require_news_question(request: pb.FollowRunRequest) -> None:
    require(request.version)
    require(request.progress)
    if len(request.relayed) > _MOST_RELAYED:
        raise Rejected(ErrorCode.BAD_REQUEST, f"a shard of a relay has at most {_MOST_RELAYED} cuts of its source")
    for name in request.relayed:
        require_name("relayed", name)


_LISTS: Mapping[str, Callable[[Any], None]] = {
    "JoinRequest": _require_join,
    "RenewLeaseRequest": _require_renewal,
    "AwaitCutRequest": _require_cut_question,
    "ReadCutRequest": _require_read,
    "FollowRunRequest": _require_news_question,
    "ReplicateRequest": _require_replication,
    "UploadHeader": lambda header: _require_digest(header.digest) if header.digest else None,
}


def require_few_fields(kind: type[Message], raw: bytes) -> None:
    """Check how many fields a message and the messages in it have, before parsing, which may cost 100 times its bytes.

    ``raw`` is in the protobuf wire format; the parser refuses what breaks it. Raises :class:`Rejected`
    (``BAD_REQUEST``).
    """
    if len(raw) <= 2 * _MOST_FIELDS:  # a field has two bytes at least
        return
    for count, (number, start, end) in enumerate(fields(raw), start=1):
        if count > _MOST_FIELDS:
            raise Rejected(ErrorCode.BAD_REQUEST, f"a message has more than {_MOST_FIELDS} fields")
        field = kind.DESCRIPTOR.fields_by_number.get(number)
        holds_fields = field is not None and field.message_type is not None and end - start > 2 * _MOST_FIELDS
        if holds_fields and count_fields(raw, start, end, _MOST_INNER_FIELDS) > _MOST_INNER_FIELDS:
            raise Rejected(ErrorCode.BAD_REQUEST, f"a message in a message has more than {_MOST_INNER_FIELDS} fields")


def _count(raw: bytes, position: int, end: int) -> int:
    """Count fields, up to one more than there may be."""
    count = 0
    while position < end and count <= _MOST_INNER_FIELDS:
        # A short message or text, as nearly all are, without a call for it.
        if raw[position] & 0x87 == 2 and position + 1 < end and raw[position + 1] < 0x80:
            position += 2 + raw[position + 1]
        else:
            position = next(fields(raw, position, end), (0, end, end))[2]
        count += 1
    return count
