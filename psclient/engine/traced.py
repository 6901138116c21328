"""Steps in a trace, of a worker that was asked to trace them; nothing of this runs in others."""

from psclient.compress.gradients import Gradients, Scale
from psclient.compress.groups import Rates
from psclient.compress.host_table import Sent
from psclient.engine.engine import Engine, PushOutcome, Replies
from psclient.report import StepReport
from psclient.rpc.shard_stream import ShardStream
from psclient.rpc.traced import TracedShardStream
from pscore.telemetry import tracing
from pscore.telemetry.span import NO_SPAN
from pscore.wire.errors import ErrorCode


class TracedEngine(Engine):
    """An :class:`Engine` whose steps are spans, from the opening of the push until its reply is applied."""

    _opened_span = _awaited_span = NO_SPAN  # two: with overlap a push may open before the last reply

    def _open(self, samples: int, rates: Rates) -> StepReport:
        self._opened_span = tracing.begin_step(step=self._next_step, worker=self.run.identity.worker_id)
        with self._opened_span.active():
            return super()._open(samples, rates)

    def send_gradients(
        self, report: StepReport, number: int, gradients: Gradients, scale: Scale, sent: Sent | None = None
    ) -> None:
        """Select from a group and send it."""
        with self._opened_span.active():
            super().send_gradients(report, number, gradients, scale, sent)

    def _send_residuals(self, report: StepReport, number: int) -> None:
        with self._opened_span.active():
            super()._send_residuals(report, number)

    def abandon_push(self) -> None:
        """Break off a push that has no commit yet."""
        super().abandon_push()
        self._opened_span.end("abandoned")

    def ask(self) -> None:
        """Ask for the reply to the committed push."""
        with self._opened_span.active():
            super().ask()

    def await_ack(self, report: StepReport) -> None:
        """Wait until each part of the push is acknowledged or refused."""
        self._awaited_span = self._opened_span
        super().await_ack(report)

    def _refuse(self, shard: ShardStream, outcome: PushOutcome) -> None:
        assert isinstance(shard, TracedShardStream)
        shard.push_span.end(ErrorCode.STALE_GENERATION.name)  # unless an answer has ended it
        super()._refuse(shard, outcome)

    def fetch(self) -> Replies:
        """Fetch the changes that the replica lacks."""
        with self._awaited_span.active():
            return super().fetch()

    def apply(self, report: StepReport, replies: Replies) -> None:
        """Write the replies into the parameters."""
        with self._awaited_span.active():
            super().apply(report, replies)
        self._awaited_span.note(version=report.version, staleness=report.staleness)
        self._awaited_span.end()
