"""The one place where a :class:`pscore.reasons.Refusal` becomes a gRPC status."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from pscore.reasons import DOMAIN, Refusal
from psservice.metrics import Metrics

log = logging.getLogger(__name__)


@contextmanager
def refusals_as_status(context: grpc.ServicerContext, metrics: Metrics, rpc: str) -> Iterator[None]:
    """Abort the call with the right status where the body refuses; log and hide anything unforeseen."""
    try:
        yield
    except Refusal as refusal:
        metrics.refusals.labels(reason=refusal.reason.name).inc()
        log.log(
            logging.DEBUG if refusal.retry_seconds is not None else logging.INFO,
            "refused",
            extra={"rpc": rpc, "reason": refusal.reason.name, "detail": refusal.detail},
        )
        _abort(context, refusal)
    except grpc.RpcError:
        raise  # the client is gone; nothing to answer
    except Exception:
        if not context.is_active():
            raise
        log.exception("internal error", extra={"rpc": rpc})
        context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")


def _abort(context: grpc.ServicerContext, refusal: Refusal) -> NoReturn:
    details = [_packed(ErrorInfo(reason=refusal.reason.wire_name, domain=DOMAIN, metadata=refusal.metadata))]
    if refusal.retry_seconds is not None:
        delay = Duration()
        delay.FromNanoseconds(int(refusal.retry_seconds * 1e9))
        details.append(_packed(RetryInfo(retry_delay=delay)))
    code = grpc.StatusCode[refusal.reason.status_name]
    status = Status(code=code.value[0], message=str(refusal), details=details)
    context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status returned")


def _packed(message: ErrorInfo | RetryInfo) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed
