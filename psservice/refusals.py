"""The one place where a :class:`pscore.reasons.Refusal` ends a call."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from pscore import errordetails
from pscore.reasons import Refusal
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
        context.abort_with_status(errordetails.to_status(refusal))
    except grpc.RpcError:
        raise  # the client is gone; nothing to answer
    except Exception:
        if not context.is_active():
            raise
        log.exception("internal error", extra={"rpc": rpc})
        context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")
