"""The calls of one shard in a trace, of a worker that was asked to trace its steps."""

from psclient.rpc.channel import RetryPolicy
from psclient.rpc.shard_stream import PulledReply, PushPart, ShardStream
from pscore.model.layout import Span
from pscore.telemetry import tracing
from pscore.telemetry.span import NO_SPAN, TraceSpan
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb


class TracedShardStream(ShardStream):
    """A :class:`ShardStream` whose pushes and pulls are spans, which the server continues."""

    push_span = NO_SPAN  # of the push that was opened last
    _pull_span: TraceSpan | None = None  # of the pull that is asked for

    def open_push(self, header: pb.PushHeader, plan: list[Span], idle_seconds: float) -> None:
        """Begin to stream a push."""
        self.push_span = tracing.begin("push", shard=self.index)
        header.traceparent = self.push_span.parent
        super().open_push(header, plan, idle_seconds)

    def abandon_push(self) -> list[PushPart]:
        """Break off a push that has no commit."""
        self.push_span.end("abandoned")
        return super().abandon_push()

    def await_ack(self, policy: RetryPolicy) -> pb.PushSparseResponse | Rejected:
        """Wait for the answer to the unacked part."""
        answer = super().await_ack(policy)
        if not isinstance(answer, Rejected):
            self.push_span.note(version=answer.version, staleness=answer.staleness)
            self.push_span.end()
        elif answer.reason is not ErrorCode.LEASE_EXPIRED:  # else it is repeated, after joining
            self.push_span.end(answer.reason.name)
        return answer

    def ask(self, identity: pb.WorkerIdentity, step: int, idle_seconds: float) -> None:
        """Send the request of the next pull ahead."""
        self._begin_pull()
        super().ask(identity, step, idle_seconds)

    def pull(self, identity: pb.WorkerIdentity, policy: RetryPolicy) -> PulledReply | Rejected:
        """Fetch the changes that the replica lacks."""
        span, self._pull_span = self._pull_span or self._begin_pull(), None
        try:
            answer = super().pull(identity, policy)
        except BaseException as error:
            span.end(type(error).__name__)
            raise
        span.end(answer.reason.name if isinstance(answer, Rejected) else "")
        return answer

    def _begin_pull(self) -> TraceSpan:
        self._pull_span = tracing.begin("pull", shard=self.index)
        self._pull_parent = self._pull_span.parent
        return self._pull_span
