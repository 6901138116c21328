"""A worker's steps: check the gradients, push, await the acknowledgement, fetch the reply, apply it.

With overlap the same goes on beside the computation (:mod:`psclient.engine.overlap`), and a step waits for it.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from psclient.compress.gradients import Gradients, Scale
from psclient.compress.groups import ParamGroups, Rates
from psclient.compress.table import Sent
from psclient.engine.checks import PushedGradients, finite, refuse_unsound, require_trainable
from psclient.engine.overlap import Overlap
from psclient.engine.push_pull import PushPull
from psclient.engine.sample_counter import SampleCounter
from psclient.errors import (
    STEP_AGAIN,
    ConfigurationError,
    ModelChangedError,
    ModelLoadedError,
    NonFiniteGradientError,
    RunFinishedError,
    ServerUnreachableError,
    SparsepsError,
)
from psclient.model.module import TrainedModel
from psclient.report import StepReport, Totals
from psclient.rpc.channel import suppress_errors
from psclient.rpc.cluster import Cluster
from pscore.names import shown
from pscore.selection.cuda.launches import UnsoundError
from pscore.wire.v1 import parameter_server_pb2 as pb

log = logging.getLogger("psclient")

CLOSING_SECONDS = 5.0
"""An end must not wait for a server that is gone."""

_SAMPLED_STEPS = 16
"""Between two looks for parameters that were written to without a trace; each reads some hundred KB twice."""

Schedule = Callable[[int], float]
"""The density of a worker's step, counted from 1."""

GradientSource = Callable[[range], dict[int, torch.Tensor]]
"""Returns the gradients (or differences) of tensors of the layout, by position, without a copy."""

GradientScale = Callable[[Sequence[torch.Tensor], int], Scale]
"""The factor for all gradients of a step, from the gradients and the number of live workers."""


class Stepper:
    """One worker's steps, without a reference to the optimizer around it.

    ``schedule`` is ``None`` where the param groups have the density; ``rates`` returns the learning rates of the next
    push; ``synchronous``: updates are gathered in rounds, or go to a model of the worker's own.
    """

    local_steps = 0  # each step is pushed

    def __init__(
        self,
        model: TrainedModel,
        groups: ParamGroups,
        cluster: Cluster,
        push_pull: PushPull,
        schedule: Schedule | None,
        rates: Callable[[], Rates],
        gradients: GradientSource,
        *,
        synchronous: bool,
    ) -> None:
        self.report, self.totals = StepReport(0), Totals()
        self._model, self._groups, self._schedule, self._rates = model, groups, schedule, rates
        self._gather, self._synchronous = gradients, synchronous
        self._membership, self._cluster, self._push_pull = cluster.membership, cluster, push_pull
        self._samples: SampleCounter | None = None
        self._samples_since_exchange = 0
        self.overlap: Overlap | None = None  # where gradients leave during backward
        self._pushed = PushedGradients()
        self._warned_no_gradient = False
        self._drifted: set[str] = set()  # tensors that others have written to, of which the log has spoken
        self._first_digest: bytes | None = None  # of the model at the beginning, until it has been compared with it
        self._end_reported = False

    @property
    def begun(self) -> bool:
        """True where hooks have submitted gradients, and the step has not ended."""
        return self.overlap is not None and self.overlap.begun

    @property
    def unfinished(self) -> bool:
        """True where a step that has not ended has pushed the gradients of now."""
        return not self.begun and self._pushed.matches(self._gather_all())

    @property
    def samples_waiting(self) -> int:
        """Samples that have passed through the model since the last step."""
        return 0 if self._samples is None else self._samples.waiting

    def start(self, samples: SampleCounter | None, *, overlap: bool) -> None:
        """Replace the model by the server's, after joining, and begin to count samples."""
        self._samples = samples
        self.report = self._fetch_and_apply(adopt_buffers=True)
        uploaded = b"" if self.report.pull_entries else self._membership.digest
        self._first_digest = uploaded or self._cluster.replica.digest()
        if overlap:
            self.overlap = Overlap(self._model, self._groups, self._push_pull, self._gather, self._begin)

    def step(self, samples: int | None, scale: GradientScale) -> None:
        """Push the gradients that are there and bring the parameters up to the server's."""
        if self._membership.run_finished:
            if self.overlap is not None and not self._end_reported:
                # The loop may have read `finished` before the reply in the background changed it.
                self._end_reported = True
                self.finish_overlap()
                self.overlap.forget()
                return
            run_id = self._membership.identity.run_id
            raise RunFinishedError(f"run {run_id!r} is over; leave the loop when optimizer.finished is true")
        self.settle_load()
        if self.overlap is not None and samples is not None:
            raise ConfigurationError("with overlap=True samples are counted at the calls of model=; leave samples out")
        found = self._gather_all()
        if not found:
            require_trainable(self._model, self._groups)
        if not self.begun and self._pushed.matches(found):
            self.finish_push()
            self._receive(self.report)
        elif self.overlap is None:
            self._step(found, samples, scale)
        else:
            self._overlapped_step(self.overlap, found)

    def completed(self) -> None:
        """Note that the caller knows of a step's end: the same gradients again are another step's."""
        self._pushed.clear()

    def flush(self, samples: int = 0) -> None:
        """Push all residuals whole; ``samples``: the first of those waiting, whose steps are in the residuals."""
        self.finish_push()
        if self._membership.run_finished:
            return
        if self._samples is not None:
            self._samples.leave_out(samples)
        self._groups.read()
        report = self.report = self._open(samples, self._rates())
        self._push(report, lambda number: self._push_pull.send_residuals(report, number))
        self._add(report)

    def flush_on_exit(self) -> None:
        """Push all residuals."""
        self.flush()

    def pull(self) -> None:
        """Bring the parameters up to the server's without pushing, wherever they lie now."""
        self.finish_overlap()
        self.settle_load(drops=True)
        self._await_unacked()
        self._fetch_and_apply()

    def wait_for_all(self, seconds: float) -> None:
        """Wait until all live workers are through; the buffers are the average of all then."""
        self.finish_push()
        if self._samples_since_exchange:
            self._exchange_last_buffers()
        self._membership.wait_for_all(seconds, self._push_pull.step)
        self.totals.buffer_bytes += self._cluster.exchange_buffers(self._push_pull.step, 0)

    def settle_load(self, *, drops: bool = False) -> bool:
        """Offer a model that was loaded into the worker to the servers; return whether the model is another one now.

        That costs next to nothing where nobody has written to the model; the first time all of it is read. If a
        trained server refuses the model (docs/guide/training.md), it is dropped (``drops``) or
        :class:`ModelLoadedError` raised. :class:`ModelChangedError` where a tensor is of another kind.
        """
        self._model.check()
        replica = self._cluster.replica
        name = replica.loaded()
        if self._cluster.buffers_travel:
            self._cluster.buffers.now()  # raises where a buffer is of another kind
        if name is None:
            self._warn_of_drift(replica.drifted())
        if name is None and self._first_digest is None:
            return False
        digest = replica.digest()
        changed = digest != self._first_digest
        if self._first_digest is not None:
            self._model.check_frozen()
        if changed and self._first_digest is None and not drops:
            self._model.refuse_averages(replica.written())
        if changed:
            self.finish_push()
            self._offer_model(name or self._model.layout.parameters[0].name, digest, drops=drops)
            self._fetch_and_apply(adopt_buffers=True)
        else:
            replica.accept()
        self._first_digest = None
        return changed

    def _warn_of_drift(self, tensor: str | None) -> None:
        if tensor is None or tensor in self._drifted:
            return
        self._drifted.add(tensor)
        log.warning(
            "%r has other values than the last reply left, and nothing has counted the writing: the script writes "
            "through .data, say. The server does not know these values, and this worker computes its gradients for "
            "another model than the server's from now on. Leave the parameters alone between two steps. A change "
            "that all workers are to have is written under torch.no_grad() with on_load='replace' (docs/guide/"
            "training.md, A model that is loaded later). A random block of the parameters is looked at every %d steps",
            tensor,
            _SAMPLED_STEPS,
        )

    def _offer_model(self, tensor: str, digest: bytes, *, drops: bool) -> None:
        """Offer the parameters, of which ``tensor`` was written to, to the servers; a pull brings what is missing."""
        membership = self._membership
        before, on_load = membership.coordinator.generation, membership.settings.on_load
        accepted = membership.join(pb.LoadedModel(digest=digest, replaces=on_load == "replace"))
        if not accepted and on_load == "error" and not drops:
            raise ModelLoadedError(tensor, membership.identity.run_id, membership.joined_version)
        if not accepted:
            log.warning(
                "the model that was loaded is dropped, as %s says: run %s goes on from its own, at version %d",
                'on_load="server"' if on_load == "server" else "pull()",
                shown(membership.identity.run_id),
                membership.joined_version,
            )
        self._cluster.replica.accept()
        if membership.coordinator.generation == before or not all(shard.has_base for shard in self._cluster.shards):
            for shard in self._cluster.shards:
                shard.forget_base()

    def finish_push(self) -> None:
        """Finish the work in the background, and await the answer to the last push."""
        self.finish_overlap()
        self._await_unacked()

    def finish_overlap(self) -> None:
        """With overlap: end the work in the background, and apply the reply that is awaited.

        A reply to a replica that others have written to is dropped: the next step reports the writing.
        """
        if self.overlap is None or self.overlap.in_child:
            return
        seconds = self._membership.seconds_left
        try:
            self.overlap.break_off(seconds)
            replies = self.overlap.collect(seconds)
        except TimeoutError as error:
            if isinstance(error, SparsepsError):
                raise
            address = self._membership.coordinator.address
            raise ServerUnreachableError(address, seconds or 0.0, "a reply is awaited", STEP_AGAIN) from None
        try:
            if replies is None or self._cluster.replica.loaded() is not None:
                return
        except ModelChangedError:
            return
        report = StepReport(self._push_pull.step)
        self._push_pull.apply(report, replies)
        self._add(report)

    def leave(self) -> None:
        """Finish what can be in the time left, and leave the run."""
        try:
            suppress_errors(self.finish_overlap)
            if self._samples_since_exchange and not self._push_pull.unacked_parts():
                suppress_errors(self._exchange_last_buffers)
        finally:
            self._close()

    def abandon(self) -> None:
        """Leave the run after the optimizer was collected; the model, which may be in use, is not changed."""
        self._membership.set_deadline(CLOSING_SECONDS)
        try:
            if self.overlap is not None:
                with suppress(TimeoutError):
                    self.overlap.break_off(self._membership.seconds_left)
                self.overlap.close()  # before the worker leaves: a pull under way would join again
        finally:
            self._close()

    def _close(self) -> None:
        if self._samples is not None:
            self._samples.close()
        self._cluster.close()
        if self.overlap is not None:
            self.overlap.close()

    def _await_unacked(self) -> None:
        if self._push_pull.unacked_parts():
            self._push_pull.await_ack(self.report)

    def _gather_all(self) -> dict[int, torch.Tensor]:
        return self._gather(range(len(self._model.parameters)))

    def _fetch_and_apply(self, *, adopt_buffers: bool = False) -> StepReport:
        """Make the parameters the server's, and with ``adopt_buffers`` the buffers, too."""
        report = StepReport(self._push_pull.step)
        self._push_pull.count(report, self._cluster.pull())
        if adopt_buffers:
            report.buffer_bytes = self._cluster.exchange_buffers(report.step, 0, adopt=True)
        self._add(report)
        return report

    def _add(self, report: StepReport) -> None:
        self.totals.add(report)
        self.totals.refused = self._push_pull.refused
        self.totals.upload_bytes = self._membership.upload_bytes

    def _step(self, found: dict[int, torch.Tensor], samples: int | None, scale: GradientScale) -> None:
        if not found and not self._warned_no_gradient:
            self._warned_no_gradient = True
            log.warning(
                "step() has found no gradient in any of its parameters: is model= the one that the loop trains?"
            )
        gradients = finite(self._model, found, waits=not self._push_pull.selects_before_opening(found.keys()))
        self._await_unacked()  # the answer has the number of live workers
        factor = scale(list(gradients.values()), self._membership.live_workers)
        if gradients.unsound is None:
            factor = float(factor)
        early, first = StepReport(0), None
        rates = self._ready()
        if gradients.unsound is not None:
            first = self._select(early, gradients, factor)
            self._pushed.note(found)  # what is not pushed of them is in the residuals
        try:
            report = self.report = self._open(self._counted(samples), rates)
        except BaseException:
            self._push_pull.put_back([] if first is None else first.slices)
            raise
        report.seconds, report.wanted_entries = early.seconds, early.wanted_entries
        report.selected_entries = early.selected_entries
        self._pushed.note(found)  # from the commit on these gradients are pushed, whatever becomes of the reply

        def send(number: int) -> None:
            self._push_pull.send_gradients(report, number, gradients, factor, None if number else first)

        try:
            self._push(report, send, asks=True)
        except NonFiniteGradientError:
            self._pushed.clear()
            raise
        self._receive(report)

    def _select(self, report: StepReport, gradients: Gradients, factor: Scale) -> Sent:
        """Select from the first group; where gradients are not finite, the device has changed nothing."""
        try:
            return self._push_pull.select(report, gradients, factor)
        except UnsoundError:
            refuse_unsound(self._model, gradients)
            return self._push_pull.select(report, gradients, factor)

    def _overlapped_step(self, overlap: Overlap, found: dict[int, torch.Tensor]) -> None:
        report = self.report = overlap.finish()
        self._pushed.note(found)
        if self._synchronous:  # nothing is staler: the mean of this step is applied in this step
            self._await_ack(report, asks=True)
            self._receive(report)
            return
        with report.timed("wait"):
            replies = overlap.collect()
        if replies is not None:
            self._push_pull.apply(report, replies)
        overlap.launch(report)
        self._end(report)

    def _begin(self) -> StepReport:
        """Open the push of a new step, at the schedule's density, once the last push is answered."""
        self._await_unacked()
        rates = self._ready()
        return self._open(self._counted(None), rates)

    def _ready(self) -> Rates:
        """Set the density of the next step, read its hyper-parameters, and return its learning rates.

        The shards are told if all is pushed.
        """
        if self._schedule is not None:
            self._groups.set_density(self._schedule(self._push_pull.next_step))
        self._groups.read()
        for shard in self._cluster.shards:
            shard.pushes_all = self._groups.send_all
        return self._rates()

    def _counted(self, samples: int | None) -> int:
        counted = self._samples.take(warn=samples is None) if self._samples is not None else 1
        if samples is None:
            self._cluster.progress.check(counted)
        return counted if samples is None else samples

    def _open(self, samples: int, rates: Rates) -> StepReport:
        self._samples_since_exchange += samples
        self.totals.samples += samples
        return self._push_pull.open(samples, rates)

    def _push(self, report: StepReport, send: Callable[[int], None], *, asks: bool = False) -> None:
        """Send every group of the open push, commit, ask for the reply where one is to be fetched, await the ack."""
        try:
            for number in range(len(self._push_pull.groups)):
                send(number)
            self._push_pull.commit(report)
        except BaseException:
            self._push_pull.abandon()
            raise
        self._await_ack(report, asks=asks)

    def _await_ack(self, report: StepReport, *, asks: bool) -> None:
        if asks:
            self._push_pull.ask()
        with report.timed("wait"):
            self._push_pull.await_ack(report)

    def _receive(self, report: StepReport) -> None:
        """Fetch the reply to an answered push, apply it, and end the step."""
        with report.timed("wait"):
            replies = self._push_pull.fetch()
        report.move(max(reply.decode_seconds for reply in replies.values()), "wait", "apply")
        self._push_pull.apply(report, replies)
        self._end(report)

    def _end(self, report: StepReport) -> None:
        if self._push_pull.merged is not None:
            self._push_pull.merged.advance()
        if report.step % self._membership.run_settings.buffer_period_steps == 0:
            with report.timed("buffers"):
                report.buffer_bytes = self._cluster.exchange_buffers(report.step, self._samples_since_exchange)
            self._samples_since_exchange = 0
        self._add(report)
        if report.step % _SAMPLED_STEPS == 1:
            self._cluster.replica.sample()
        if not self._synchronous:
            self._groups.warn_of_momentum(self._membership.live_workers)

    def _exchange_last_buffers(self) -> None:
        self.totals.buffer_bytes += self._cluster.exchange_buffers(self._push_pull.step, self._samples_since_exchange)
        self._samples_since_exchange = 0
