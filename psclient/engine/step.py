"""A worker's steps: check the gradients, push, settle, fetch the reply, apply it (:mod:`psclient.engine.exchange`).

With overlap the same goes on beside the computation (:mod:`psclient.engine.overlap`), and what is here waits for it.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from psclient.compress.groups import ParamGroups, Rates
from psclient.compress.hyperparameters import MomentumAdvice
from psclient.data.counter import SampleCounter
from psclient.engine.checks import Interrupted, finite
from psclient.engine.exchange import Exchange
from psclient.engine.overlap import Overlap
from psclient.errors import (
    STEP_AGAIN,
    ConfigurationError,
    NonFiniteGradientError,
    RunFinishedError,
    ServerUnreachableError,
    SparsepsError,
)
from psclient.model.module import TrainedModel
from psclient.report import StepReport, Totals
from psclient.rpc.channel import suppress_errors
from psclient.rpc.cluster import Cluster
from psclient.rpc.membership import Membership

log = logging.getLogger("psclient")

CLOSING_SECONDS = 5.0
"""An end must not wait for a server that is gone."""

Schedule = Callable[[int], float]
"""The density of a worker's step, counted from 1."""

GradientSource = Callable[[range], dict[int, torch.Tensor]]
"""Returns what tensors of the layout have to push, by position, as it is; costs nothing."""

GradientScale = Callable[[Sequence[torch.Tensor], int], float]
"""The factor for all gradients of a step, from the gradients and the number of live workers."""


class Stepper:
    """Takes one worker's steps, and knows nothing of the optimizer around it.

    Args:
        model: what is trained.
        groups: with which hyper-parameters.
        membership: its worker's place in the run.
        cluster: all shards.
        exchange: its worker's pushes and pulls.
        schedule: the density of each step; ``None`` leaves it to the param groups.
        rates: returns the learning rates of the next push.
        synchronous: whether updates are gathered in rounds, or go to a model of the worker's own.
        gradients: collects what there is to push.

    Attributes:
        report: what the last step did.
        totals: sums over all steps.
        local_steps: 0, since each step is pushed.
    """

    local_steps = 0

    def __init__(
        self,
        model: TrainedModel,
        groups: ParamGroups,
        membership: Membership,
        cluster: Cluster,
        exchange: Exchange,
        schedule: Schedule | None,
        rates: Callable[[], Rates],
        gradients: GradientSource,
        *,
        synchronous: bool,
    ) -> None:
        """Prepare; :meth:`start` follows the joining."""
        self.report = StepReport(0)
        self.totals = Totals()
        self._model, self._groups, self._schedule, self._rates = model, groups, schedule, rates
        self._gather, self._synchronous = gradients, synchronous
        self._membership, self._cluster, self._exchange = membership, cluster, exchange
        self._samples: SampleCounter | None = None
        self._samples_since_exchange = 0
        self._overlap: Overlap | None = None
        self._interrupted = Interrupted()
        self._told_of_nothing = False
        self._digest: bytes | None = None  # of the model at the beginning, until it has been compared with it
        self._end_told = False
        self._momentum_advice = MomentumAdvice()

    @property
    def overlaps(self) -> bool:
        """Whether gradients leave during backward."""
        return self._overlap is not None

    @property
    def begun(self) -> bool:
        """True where a backward pass has handed gradients over, and the step has not ended."""
        return self._overlap is not None and self._overlap.begun

    @property
    def unfinished(self) -> bool:
        """True where the gradients that are there have been pushed, by a step that has not come to its end."""
        return not self.begun and self._interrupted.holds(self._gather(range(len(self._model.parameters))))

    @property
    def samples_waiting(self) -> int:
        """Samples that have passed through the model, and whose step is still to come."""
        return 0 if self._samples is None else self._samples.waiting

    def start(self, samples: SampleCounter | None, *, overlap: bool) -> None:
        """Take the server's model over, after joining, and begin to count samples."""
        self._samples = samples
        self._exchange.count(self.report, self._cluster.pull())
        self._digest = self._cluster.digest()
        self.report.buffer_bytes = self._cluster.exchange_buffers(0, 0, adopt=True)
        if overlap:
            self._overlap = self._start_overlap()
        self.totals.add(self.report)
        self.totals.upload_bytes = self._membership.upload_bytes

    def step(self, samples: int | None, scale: GradientScale) -> None:
        """Push the gradients that are there and bring the parameters up to the server's."""
        if self._membership.run_finished:
            if self._overlap is not None and not self._end_told:
                # The loop may have looked at `finished` before the reply in the background has turned it.
                self._end_told = True
                self.drain()
                self.forget()
                return
            run_id = self._membership.identity.run_id
            raise RunFinishedError(f"run {run_id!r} is over; leave the loop when optimizer.finished is true")
        self.settle_load()
        if self._overlap is None:
            self._step(samples, scale)
        else:
            self._overlapped_step(self._overlap, samples)

    def completed(self) -> None:
        """Note that the caller of a step knows of its end: the same gradients again are another step's."""
        self._interrupted.clear()

    def flush(self, samples: int = 0) -> None:
        """Push everything that is held, at density 1.

        Args:
            samples: the first of those that have passed through the model, whose steps are in what is held.
        """
        self.rest()
        if self._membership.run_finished:
            return
        rates = self._rates()
        if self._samples is not None:
            self._samples.leave_out(samples)
        self._samples_since_exchange += samples
        self.totals.samples += samples
        report = self.report = self._exchange.open(samples, rates)
        self._push(report, lambda number: self._exchange.send_held(report, number))
        self.totals.add(report)

    def flush_on_exit(self) -> None:
        """Push what is to stay behind: everything that is held."""
        self.flush()

    def pull(self) -> None:
        """Bring the parameters up to the server's without pushing, wherever they lie now."""
        self.drain()
        self.settle_load(drops=True)
        self._settle_doubt()
        self._fetch_and_apply()

    def settle_load(self, *, drops: bool = False) -> bool:
        """Bring server and worker together again where a model was loaded into the worker (docs/training.md).

        That costs next to nothing where nobody has written to the model; the first time all of it is read.

        Args:
            drops: whether a model that cannot be the server's is dropped.

        Returns:
            Whether the worker has another model than it had.

        Raises:
            ModelLoadedError: one was, and the server's has been trained.
            ModelChangedError: a tensor of the model is another one than it was.
        """
        self._model.check()
        name = self._cluster.loaded_tensor()
        if name is None and self._digest is None:
            return False
        digest = self._cluster.digest()
        changed = digest != self._digest
        if self._digest is not None:
            self._model.check_frozen()
        if changed:
            self.rest()
            name = name or self._model.layout.parameters[0].name
            self._cluster.offer_model(name, digest, self._membership.settings.on_load, drops=drops)
            self._fetch_and_apply()
            self.totals.buffer_bytes += self._cluster.exchange_buffers(self._exchange.step, 0, adopt=True)
        else:
            self._cluster.accept_model()
        self._digest = None
        return changed

    def rest(self) -> None:
        """Come to rest: nothing goes on in the background, and no push is in doubt."""
        self.drain()
        self._settle_doubt()

    def drain(self) -> None:
        """With overlap: end what goes on in the background, and apply the reply that is awaited.

        A reply to a replica that was changed meanwhile is dropped, as if it had not come: the next step tells.
        """
        if self._overlap is None or self._overlap.in_child:
            return
        seconds = self._membership.seconds_left
        try:
            self._overlap.break_off(seconds)
            replies = self._overlap.collect(seconds)
        except TimeoutError as error:
            if isinstance(error, SparsepsError):
                raise
            address = self._membership.coordinator.address
            raise ServerUnreachableError(address, seconds or 0.0, "a reply is awaited", STEP_AGAIN) from None
        if replies is not None and self._cluster.replica_is_intact:
            report = StepReport(self._exchange.step)
            self._exchange.apply(report, replies)
            self.totals.add(report)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """With overlap: leave the gradients of the backward passes in the body alone."""
        if self._overlap is None:
            yield
            return
        with self._overlap.accumulating():
            yield

    def forget(self) -> None:
        """With overlap: skip a batch after its backward pass."""
        if self._overlap is not None and self._overlap.begun and not self._overlap.in_child:
            self._overlap.forget()

    def leave(self) -> None:
        """Bring to an end what has begun, as far as that can be done in the time left, and leave the run."""
        try:
            suppress_errors(self.drain)
            if self._samples is not None:
                self._samples.close()
            samples = self._samples_since_exchange
            if samples and not self._cluster.in_doubt:
                suppress_errors(lambda: self._exchange_at_end(samples))
        finally:
            self._cluster.close()
            if self._overlap is not None:
                self._overlap.close()

    def abandon(self) -> None:
        """Leave the run where nobody has the optimizer any more; the model, which may be in use, stays as it is."""
        self._membership.hurry(CLOSING_SECONDS)
        try:
            if self._samples is not None:
                self._samples.close()
            if self._overlap is not None:
                with suppress(TimeoutError):
                    self._overlap.break_off(self._membership.seconds_left)
                self._overlap.close()
        finally:
            self._cluster.close()

    # Inner parts

    def _fetch_and_apply(self) -> None:
        report = StepReport(self._exchange.step)
        self._exchange.count(report, self._cluster.pull())
        self.totals.add(report)
        self.totals.refused = self._exchange.refused
        self.totals.upload_bytes = self._membership.upload_bytes

    def _step(self, samples: int | None, scale: GradientScale) -> None:
        found = self._gather(range(len(self._model.parameters)))
        if self._interrupted.holds(found):
            self._settle_doubt()
            self._receive(self.report)
            return
        if not found and not self._told_of_nothing:
            self._told_of_nothing = True
            log.warning(
                "step() has found no gradient in any of its parameters: is model= the one that the loop trains?"
            )
        gradients = finite(self._model, found)
        self._settle_doubt()
        factor = scale(list(gradients.values()), self._membership.live_workers)
        report = self.report = self._begin(samples)
        self._interrupted.note(found)  # from the commit on these gradients are pushed, whatever becomes of the reply
        try:
            self._push(report, lambda number: self._exchange.send_gradients(report, number, gradients, factor))
        except NonFiniteGradientError:
            self._interrupted.clear()
            raise
        self._receive(report)

    def _overlapped_step(self, overlap: Overlap, samples: int | None) -> None:
        if samples is not None:
            raise ConfigurationError("with overlap=True samples are counted at the calls of model=; leave samples out")
        found = self._gather(range(len(self._model.parameters)))
        if not overlap.begun and self._interrupted.holds(found):
            self.rest()
            self._receive(self.report)
            return
        report = self.report = overlap.finish()
        self._interrupted.note(found)
        with report.timed("wait"):
            replies = overlap.collect()
        if replies is not None:
            self._exchange.apply(report, replies)
        overlap.launch(report)
        self._end(report)

    def _begin(self, samples: int | None = None) -> StepReport:
        """Open the push of a new step, at the density that the schedule gives it."""
        rates = self._rates()
        if self._schedule is not None:
            self._groups.set_density(self._schedule(self._exchange.step + 1))
        counted = self._samples.take(warn=samples is None) if self._samples is not None else 1
        samples = counted if samples is None else samples
        self._samples_since_exchange += samples
        self.totals.samples += samples
        return self._exchange.open(samples, rates)

    def _push(self, report: StepReport, send: Callable[[int], None]) -> None:
        """Send every group of the open push, commit, and settle."""
        try:
            for number in range(len(self._exchange.groups)):
                send(number)
            self._exchange.commit(report)
        except BaseException:
            self._exchange.abandon()
            raise
        with report.timed("wait"):
            self._exchange.settle(report)

    def _receive(self, report: StepReport) -> None:
        """Fetch the reply to a settled push, apply it, and end the step."""
        with report.timed("wait"):
            replies = self._exchange.fetch()
        report.move(max(reply.decode_seconds for reply in replies.values()), "wait", "apply")
        self._exchange.apply(report, replies)
        self._end(report)

    def _end(self, report: StepReport) -> None:
        self._exchange.regroup()
        if report.step % self._membership.run_settings.buffer_period_steps == 0:
            with report.timed("buffers"):
                report.buffer_bytes = self._cluster.exchange_buffers(report.step, self._samples_since_exchange)
            self._samples_since_exchange = 0
        self.totals.add(report)
        self.totals.upload_bytes = self._membership.upload_bytes
        self.totals.refused = self._exchange.refused
        if not self._synchronous:
            self._momentum_advice.check(self._membership.live_workers, self._groups.all)

    def _exchange_at_end(self, samples: int) -> None:
        self.totals.buffer_bytes += self._cluster.exchange_buffers(self._exchange.step, samples)

    def _settle_doubt(self) -> None:
        if self._exchange.in_doubt:
            self._exchange.settle(self.report)

    def _start_overlap(self) -> Overlap:
        def trained() -> dict[int, torch.Tensor]:
            return {
                position: parameter
                for position, parameter in enumerate(self._model.parameters)
                if parameter.requires_grad and parameter in self._groups
            }

        def begin() -> StepReport:
            self._settle_doubt()
            return self._begin()

        return Overlap(self._exchange, trained, begin, self._gather, lambda found: finite(self._model, found))
