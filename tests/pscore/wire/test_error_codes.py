"""The table of refusals: complete against the protocol, with a status and advice for each."""

import grpc
import pytest

from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb

DOCUMENTED = {
    "INVALID_ARGUMENT": {"BAD_CHUNK", "BAD_COMMIT", "NON_FINITE", "BAD_REQUEST"},
    "UNIMPLEMENTED": {"UNKNOWN_CODEC", "UNKNOWN_PROTOCOL"},
    "FAILED_PRECONDITION": {
        "STANDBY_AHEAD",
        "FINGERPRINT_MISMATCH",
        "SETTINGS_MISMATCH",
        "SHARD_MISMATCH",
        "NOT_INITIALISED",
        "STALE_GENERATION",
        "RUN_MISMATCH",
        "RUN_FINISHED",
        "STEP_OUT_OF_ORDER",
        "RELAY_RING",
    },
    "ALREADY_EXISTS": {"WORKER_ALIVE", "ALREADY_UPLOADED"},
    "NOT_FOUND": {"LEASE_EXPIRED", "NO_SUCH_WORKER", "NO_SUCH_CHECKPOINT", "NO_SUCH_CUT"},
    "ABORTED": {"TOO_STALE"},
    "OUT_OF_RANGE": {"VERSION_IN_FUTURE"},
    "RESOURCE_EXHAUSTED": {"BUSY", "ROUND_OPEN", "TOO_FAR_AHEAD"},
    "UNAVAILABLE": {"DRAINING", "NOT_DURABLE", "STANDBY", "REPLACED", "NO_STANDBY"},
    "UNAUTHENTICATED": {"UNAUTHENTICATED"},
    "PERMISSION_DENIED": {"EVICTED", "PERMISSION_DENIED"},
}


def test_every_reason_of_the_protocol_is_in_the_table():
    wire = set(pb.RefusalReason.keys()) - {"REFUSAL_REASON_UNSPECIFIED"}
    assert {reason.wire_name for reason in ErrorCode} == wire


def test_each_reason_has_its_documented_status():
    found = {}
    for reason in ErrorCode:
        found.setdefault(reason.status_name, set()).add(reason.name)
    assert found == DOCUMENTED


def test_every_status_is_one_of_grpc():
    assert {reason.status_name for reason in ErrorCode} <= set(grpc.StatusCode.__members__)


@pytest.mark.parametrize("reason", ErrorCode, ids=lambda reason: reason.name)
def test_a_reason_comes_back_from_its_wire_name_and_gives_advice(reason):
    assert ErrorCode.from_wire_name(reason.wire_name) is reason
    assert reason.advice


def test_a_reason_of_a_later_version_is_not_guessed():
    assert ErrorCode.from_wire_name("REFUSAL_REASON_FROM_TOMORROW") is None
    assert ErrorCode.from_wire_name("") is None


def test_a_refusal_says_what_why_and_what_to_do():
    refusal = Rejected(ErrorCode.BUSY, "the queue is full", retry_seconds=0.5, queue="writer")
    assert str(refusal) == f"the queue is full (BUSY: {ErrorCode.BUSY.advice})"
    assert (refusal.detail, refusal.retry_seconds, refusal.metadata) == ("the queue is full", 0.5, {"queue": "writer"})
