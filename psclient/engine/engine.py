"""A worker's engine: check the gradients, select, push, await the acknowledgement, fetch the reply, apply it.

The order is that of docs/reference/protocol.md. With overlap the same goes on beside the computation
(:mod:`psclient.engine.overlap`), and a step waits for it.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from psclient.compress.gradients import Gradients, PushedGradients, Scale, refuse_unsound, require_trainable
from psclient.compress.groups import ParamGroups, Rates
from psclient.compress.host_table import Choice, Sent
from psclient.compress.method import Method, State
from psclient.compress.residuals import RESIDUAL_TYPES
from psclient.compress.selector import Grouping, Selector
from psclient.engine import sigterm
from psclient.engine.freed import FreedMemory
from psclient.engine.home import Home, OneProcess, Ranks
from psclient.engine.lifecycle import Lifecycle
from psclient.engine.mgs import LayerDensity, MergedGradients
from psclient.engine.overlap import Overlap
from psclient.engine.sample_counter import SampleCounter
from psclient.engine.segments import joined, pieces
from psclient.engine.worker_metrics import WorkerMetrics
from psclient.errors import (
    REJOIN_REASONS,
    STEP_AGAIN,
    ConfigurationError,
    ModelChangedError,
    ModelLoadedError,
    NonFiniteGradientError,
    RunFinishedError,
    ServerFaultError,
    ServerUnreachableError,
    SparsepsError,
    from_refusal,
)
from psclient.executor import current_streams, devices_of, entered
from psclient.model.module import TrainedModel
from psclient.report import StepReport, Totals
from psclient.rpc.buffers import BufferExchange
from psclient.rpc.channel import suppress_errors
from psclient.rpc.run import Run
from psclient.rpc.shard_stream import PulledReply, PushPart, ShardStream
from psclient.settings import ClientSettings
from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice, entries
from pscore.names import shown
from pscore.selection import SELECTORS
from pscore.selection.cuda.launches import UnsoundError
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb

log = logging.getLogger("psclient")

Result = TypeVar("Result")

_CLOSING_SECONDS = 5.0  # an end must not wait for a server that is gone
_LEAVING_SECONDS = 5.0  # for calls whose answers are of no consequence, and threads that end

_SAMPLED_STEPS = 16
"""Between two looks for parameters that were written to without a trace; each reads some hundred KB twice."""

Schedule = Callable[[int], float]
"""The density of a worker's step, counted from 1."""

GradientSource = Callable[[range], dict[int, torch.Tensor]]
"""Returns the gradients (or differences) of tensors of the layout, by position, without a copy."""

GradientScale = Callable[[Sequence[torch.Tensor], int], Scale]
"""Returns the factor for all gradients of a step, from the gradients and the number of live workers."""

Replies = dict[int, PulledReply]


@dataclass
class PushOutcome:
    """What became of the parts of a push; ``error`` is a refusal to be raised once ``refused`` parts are restored."""

    answers: list[pb.PushSparseResponse] = field(default_factory=list)
    refused: list[PushPart] = field(default_factory=list)
    error: Rejected | None = None


class Engine:
    """One worker's steps, and the thread in which they are taken; without a reference to the optimizer around it.

    ``states`` has each parameter's memories, as the method has them; ``agreed`` are the settings in which all workers
    of the run must agree; ``schedule`` is ``None`` if the param groups have the density; ``rates`` returns the rates of
    the next push; ``synchronous``: updates are gathered in rounds, or go to a model of the worker's own; ``ranks``
    have the model, if this process has not.

    Attributes:
        number: of the step that was begun last.
        acknowledged_step: the last one that some shard has applied.
        refused: parts of pushes that went back.
        overlap: if gradients leave during backward.
        pushed: the gradients of a step that was pushed, until its caller knows of its end.
        merged: measures pushes, and chooses the groups of ``grouping``, if that was asked for.
    """

    local_steps = 0  # each step is pushed

    def __init__(
        self,
        method: Method,
        model: TrainedModel,
        groups: ParamGroups,
        states: MutableMapping[torch.Tensor, State],
        agreed: Mapping[str, str],
        settings: ClientSettings,
        life: Lifecycle,
        schedule: Schedule | None,
        layer_density: LayerDensity | None,
        rates: Callable[[], Rates],
        gradients: GradientSource,
        *,
        synchronous: bool,
        ranks: Ranks | None = None,
    ) -> None:
        self.life, layout = life, model.layout
        self.grouping = Grouping(layout, settings.bucket_bytes)
        choice = Choice(
            SELECTORS[settings.selector],
            layout.whole_below(settings.dense_below),
            kept_in=RESIDUAL_TYPES[settings.residual_type],
        )
        self._home: Home
        if ranks is None:
            self._home = OneProcess(model, Selector(method, model, states, groups, choice, self.grouping))
        else:
            self._home = ranks.home(method, model, states, groups, choice)
        self.replica, self.selector = self._home.replica, self._home.selector
        for shard in life.shards:
            shard.spill, shard.room = self._home.spill, self._home.room
        run = Run(life.shards, life.name, self.replica, model.buffers, method.name, agreed, settings, life.make_way)
        self.run, self._shards = run, run.shards
        self.merged: MergedGradients | None = None
        if (merges := settings.merge == "mgs") or layer_density is not None:
            self.merged = MergedGradients(layout, self.grouping, layer_density, merges=merges)
        self.report, self.totals = StepReport(0), Totals()
        self.number = self.acknowledged_step = self.refused = 0
        self.loss: float | None = None  # to be told with the next push
        self.metrics: WorkerMetrics | None = None
        self.overlap: Overlap | None = None
        self.pushed = PushedGradients()
        self._model, self._groups, self._schedule, self._rates = model, groups, schedule, rates
        self._gather, self._all, self._synchronous = gradients, range(len(model.parameters)), synchronous
        self._devices = devices_of(model.parameters)
        self._freed = FreedMemory()
        self._is_ahead = False
        self._before_ahead: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters, each with its own values
        buffers = BufferExchange(run)
        self._buffers = buffers if buffers.tensors.specs else None
        self._samples: SampleCounter | None = None
        self._samples_since_exchange = 0
        self._pushed_samples = [0] * len(self._shards)  # of the last push, as its header says
        self._owed_samples = [0] * len(self._shards)
        """Samples of pushes that a shard did not apply: their gradients are in the residuals, and go with the next."""
        self._warned_no_gradient = False
        self._drifted: set[str] = set()  # tensors that others have written to, of which the log has spoken
        self._first_digest: bytes | None = None  # of the model at the beginning, until it has been compared with it
        self._end_reported = False
        self._spans: list[Span] = []  # of the groups of the push that was opened last
        self._places: list[dict[int, int]] = []  # of these groups in each shard's plan
        self._outcome: PushOutcome | None = None
        self._committed_at = self._awaited_commit_at = 0.0

    # The worker's thread

    def do(self, work: Callable[[], Result]) -> Result:
        """Do work that needs a worker that has joined and not left."""
        self.require_open()
        if self.life.flushes_on_sigterm:
            sigterm.follow()
        return self.always(work, self.run.seconds_left)

    def require_open(self) -> None:
        """Raise :class:`ConfigurationError` if the worker can take no step: it has left, say."""
        self.life.require_open()
        if self._is_ahead:
            raise ConfigurationError("the parameters are others inside lookahead(): leave its body before this call")

    def always(self, work: Callable[[], Result], seconds: float | None = None) -> Result:
        """Do work, on the CUDA streams of the calling thread; after the end, in the calling thread itself.

        On an interrupt, calls to servers are cancelled and local work finishes, so the next call can continue.
        ``seconds`` is set only while closing.
        """
        streams = current_streams(self._devices)

        def body() -> Result:
            with torch.no_grad(), entered(streams):
                if self._before_ahead and not self._is_ahead:
                    self._look_back()  # what an interrupt has left
                return work()

        if not self.life.alive:
            return body()
        try:
            return self.life.thread.call(body, self.run.cancel_unawaited, seconds)
        except TimeoutError as error:
            if isinstance(error, SparsepsError):
                raise
            address, hint = self.run.coordinator.address, "What it had not pushed is lost with this worker"
            raise ServerUnreachableError(address, seconds or 0.0, "its time is over", hint) from None

    @contextmanager
    def looking_ahead(self) -> Iterator[None]:
        """Refuse all work in the body, if the parameters lack what the residuals would send."""
        self.require_open()
        try:
            self.always(self._look_ahead)
            self._is_ahead = True
            yield
        finally:
            self.end_lookahead()

    def end_lookahead(self) -> None:
        """Give the parameters the bits that they had before the body, if one has begun."""
        self._is_ahead = False
        self.always(self._look_back, self.run.seconds_left)  # a call that waits for a silent server may be before it

    def _look_ahead(self) -> None:
        for each in self.selector.take_off_unsent():
            self._before_ahead.append(each)

    def _look_back(self) -> None:
        while self._before_ahead:
            memory, values = self._before_ahead[-1]
            memory.copy_(values)
            self._before_ahead.pop()

    def close(self) -> None:
        """End the worker: finish what can be in the time left, and leave the run; harmless twice."""
        if not self.life.alive:
            return
        self.run.set_deadline(_CLOSING_SECONDS)
        thread = self.life.thread
        thread.cancel()  # only what nobody waits for can be under way: the last call was interrupted
        self.run.cancel_unawaited()
        leaving = thread.submit(torch.no_grad()(self._leave))  # goes on if the wait is interrupted
        self.life.ended = True
        try:
            leaving.result(_CLOSING_SECONDS + _LEAVING_SECONDS)
            thread.close(_LEAVING_SECONDS)
        except TimeoutError:
            log.warning("worker %s could not leave in time; its lease ends by itself", self.life.name)
        finally:
            self.life.release()

    def _leave(self) -> None:
        try:
            suppress_errors(self.finish_overlap)
            if self._samples_since_exchange and not self.unacked_parts():
                suppress_errors(self._exchange_last_buffers)
        finally:
            self._end_calls()

    def abandon(self) -> None:
        """Leave the run after the optimizer was collected; the model, which may be in use, is not changed."""
        self.run.set_deadline(_CLOSING_SECONDS)
        try:
            if self.overlap is not None:
                with suppress(TimeoutError):
                    self.overlap.break_off(self.run.seconds_left)
                self.overlap.close()  # before the worker leaves: a pull under way would join again
        finally:
            self._end_calls()
            self.life.thread.close(_LEAVING_SECONDS)

    def _end_calls(self) -> None:
        if self._samples is not None:
            self._samples.close()
        if self.metrics is not None:
            self.metrics.close()
        self.run.close()
        if self.overlap is not None:
            self.overlap.close()

    # A step

    @property
    def begun(self) -> bool:
        """True if hooks have submitted gradients, and the step has not ended."""
        return self.overlap is not None and self.overlap.begun

    @property
    def unfinished(self) -> bool:
        """True if the current gradients were already pushed by a step that then failed."""
        return not self.begun and self.pushed.matches(self._gather(self._all))

    @property
    def counts_samples(self) -> bool:
        """Whether samples are counted at the calls of a model."""
        return self._samples is not None

    @property
    def samples_waiting(self) -> int:
        """Samples that have passed through the model since the last step."""
        return 0 if self._samples is None else self._samples.waiting

    def start(self, samples: SampleCounter | None, *, overlap: bool) -> None:
        """Replace the model by the server's, after joining, and begin to count samples."""
        self._samples = samples
        self.report = self._fetch_and_apply(adopt_buffers=True)
        uploaded = b"" if self.report.pull_entries else self.run.digest
        self._first_digest = uploaded or self.replica.digest()
        if overlap:
            self.overlap = Overlap(self._model, self._groups, self, self._gather, self._begin)

    def step(self, samples: int | None, scale: GradientScale | None) -> None:
        """Push the gradients that are there and bring the parameters up to the server's."""
        if self.run.run_finished:
            if self.overlap is not None and not self._end_reported:
                # The loop may have read `finished` before the reply in the background changed it.
                self._end_reported = True
                self.finish_overlap()
                self.overlap.forget()
                return
            run_id = self.run.identity.run_id
            raise RunFinishedError(f"run {run_id!r} is over; leave the loop when optimizer.finished is true")
        self.settle_load()
        if self.overlap is not None and samples is not None:
            raise ConfigurationError("with overlap=True samples are counted at the calls of model=; leave samples out")
        found = self._gather(self._all)
        if not found:
            require_trainable(self._model, self._groups)
        if not self.begun and self.pushed.matches(found):
            self.finish_push()
            self._receive(self.report)
        elif self.overlap is None:
            self._step(found, samples, scale)
        else:
            self._overlapped_step(self.overlap, found)

    def flush(self, samples: int = 0) -> None:
        """Push all residuals whole; ``samples``: the first of those waiting, whose steps are in the residuals."""
        self.finish_push()
        if self.run.run_finished:
            return
        if self._samples is not None:
            self._samples.leave_out(samples)
        self._groups.read()
        report = self.report = self._open(samples, self._rates())
        self._push(report, lambda number: self._send_residuals(report, number), asks=False)
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
        self.run.wait_for_all(seconds, self.number)
        self.totals.buffer_bytes += self._exchange_buffers(0)

    def settle_load(self, *, drops: bool = False) -> bool:
        """Offer a model that was loaded into the worker to the servers; return whether the model is another one now.

        That costs next to nothing if nobody has written to the model; the first time all of it is read. If a
        trained server refuses the model (docs/guide/training.md), it is dropped (``drops``) or
        :class:`ModelLoadedError` raised. :class:`ModelChangedError` if a tensor is of another kind.
        """
        self._model.check()
        replica = self.replica
        name = replica.loaded()
        if self._buffers is not None and self._buffers.travel:
            self._buffers.tensors.now()  # raises if a buffer is of another kind
        if name is None and (drifted := replica.drifted()) is not None:
            self._warn_of_drift(drifted)
        if name is None and self._first_digest is None:
            return False
        digest = replica.digest()
        changed = digest != self._first_digest
        if self._first_digest is not None:
            self._home.check_frozen()
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

    def _warn_of_drift(self, tensor: str) -> None:
        if tensor in self._drifted:
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
        run = self.run
        before, on_load = run.coordinator.generation, run.settings.on_load
        accepted = run.join(pb.LoadedModel(digest=digest, replaces=on_load == "replace"))
        if not accepted and on_load == "error" and not drops:
            raise ModelLoadedError(tensor, run.identity.run_id, run.joined_version)
        if not accepted:
            log.warning(
                "the model that was loaded is dropped, as %s says: run %s goes on from its own, at version %d",
                'on_load="server"' if on_load == "server" else "pull()",
                shown(run.identity.run_id),
                run.joined_version,
            )
        self.replica.accept()
        if run.coordinator.generation == before or not all(shard.has_base for shard in self._shards):
            for shard in self._shards:
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
        seconds = self.run.seconds_left
        try:
            self.overlap.break_off(seconds)
            replies = self.overlap.collect(seconds)
        except TimeoutError as error:
            if isinstance(error, SparsepsError):
                raise
            address = self.run.coordinator.address
            raise ServerUnreachableError(address, seconds or 0.0, "a reply is awaited", STEP_AGAIN) from None
        try:
            if replies is None or self.replica.loaded() is not None:
                return
        except ModelChangedError:
            return
        report = StepReport(self.number)
        self.apply(report, replies)
        self._add(report)

    def _await_unacked(self) -> None:
        if self.unacked_parts():
            self.await_ack(self.report)

    def _fetch_and_apply(self, *, adopt_buffers: bool = False) -> StepReport:
        """Make the parameters the server's, and with ``adopt_buffers`` the buffers, too."""
        report = StepReport(self.number)
        for shard in self._shards:
            if shard.replica_is_image:  # which lacks the differences that top-k replies left out
                shard.forget_base()
        self._write(report, self.fetch())
        self._freed.give_back(report.pull_bytes)
        if adopt_buffers:
            report.buffer_bytes = self._exchange_buffers(0, adopt=True)
        self._add(report)
        return report

    def _exchange_buffers(self, samples: int, *, adopt: bool = False) -> int:
        return 0 if self._buffers is None else self._buffers.exchange(self.number, samples, adopt=adopt)

    def _add(self, report: StepReport) -> None:
        self.totals.add(report)
        self.totals.refused = self.refused
        self.totals.upload_bytes = self.run.upload_bytes

    def _step(self, found: dict[int, torch.Tensor], samples: int | None, scale: GradientScale | None) -> None:
        if not found and not self._warned_no_gradient:
            self._warned_no_gradient = True
            log.warning(
                "step() has found no gradient in any of its parameters: is model= the one that the loop trains?"
            )
        # If launches select from all tensors, the first group's tells whether the gradients are finite.
        tells = self.selector.on_one_device and not found.keys().isdisjoint(self.grouping.groups[0])
        gradients = self._home.finite(found, waits=not tells)
        self._await_unacked()  # the answer has the number of live workers
        factor = 1.0 if scale is None else scale(self._home.with_norms_of(gradients), self.run.live_workers)
        if gradients.unsound is None:
            factor = float(factor)
        early, first = StepReport(0), None
        rates = self._ready()
        if gradients.unsound is not None:
            first = self._select_first(early, gradients, factor)
            self.pushed.note(found)  # what is not pushed of them is in the residuals
        try:
            report = self.report = self._open(self._counted(samples), rates)
        except BaseException:
            self.selector.abandon()
            self.selector.restore([] if first is None else first.slices)
            raise
        if first is not None:
            report.seconds, report.wanted_entries = early.seconds, early.wanted_entries
            report.selected_entries = early.selected_entries
        self.pushed.note(found)  # from the commit on these gradients are pushed, whatever becomes of the reply

        def send(number: int) -> None:
            self.send_gradients(report, number, gradients, factor, None if number else first)

        try:
            self._push(report, send, asks=True)
        except NonFiniteGradientError:
            self.pushed.clear()
            raise
        self._receive(report)

    def _select_first(self, report: StepReport, gradients: Gradients, factor: Scale) -> Sent:
        """Select from the first group; if gradients are not finite, the device has changed nothing."""
        with report.timed("select"):
            try:
                return self.selector.compress(self.grouping.groups[0], gradients, factor, report)
            except UnsoundError:
                refuse_unsound(self._model, gradients)
                return self.selector.compress(self.grouping.groups[0], gradients, factor, report)

    def _overlapped_step(self, overlap: Overlap, found: dict[int, torch.Tensor]) -> None:
        report = self.report = overlap.finish()
        self.pushed.note(found)
        if self._synchronous:  # nothing is staler: the mean of this step is applied in this step
            self.ask()
            with report.timed("wait"):
                self.await_ack(report)
            self._receive(report)
            return
        with report.timed("wait"):
            replies = overlap.collect()
        if replies is not None:
            self.apply(report, replies)
        del replies
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
            self._groups.set_density(self._schedule(self._next_step))
        self._groups.read()
        for shard in self._shards:
            shard.pushes_all = self._groups.send_all
        return self._rates()

    def _counted(self, samples: int | None) -> int:
        counted = self._samples.take(warn=samples is None) if self._samples is not None else 1
        if samples is not None:
            return samples
        if self.run.progress is not None:
            self.run.progress.check(counted)
        return counted

    def _push(self, report: StepReport, send: Callable[[int], None], *, asks: bool) -> None:
        """Send every group of the open push, commit, ask for the reply if one is to be fetched, await the ack."""
        try:
            for number in range(len(self.grouping.groups)):
                send(number)
            self.commit(report)
        except BaseException:
            self.abandon_push()
            raise
        if asks:
            self.ask()
        with report.timed("wait"):
            self.await_ack(report)

    def _receive(self, report: StepReport) -> None:
        """Fetch the reply to an answered push, apply it, and end the step."""
        with report.timed("wait"):
            replies = self.fetch()
        report.move(max(reply.decode_seconds for reply in replies.values()), "wait", "apply")
        self.apply(report, replies)
        del replies  # so that the end of the step gives its memory back
        self._end(report)

    def _end(self, report: StepReport) -> None:
        if self.merged is not None:
            self.merged.advance()
        if self._buffers is not None and report.step % self.run.run_settings.buffer_period_steps == 0:
            with report.timed("buffers"):
                report.buffer_bytes = self._exchange_buffers(self._samples_since_exchange)
            self._samples_since_exchange = 0
        self._add(report)
        if self.metrics is not None:
            self.metrics.observe(report, self.run.identity.run_id)
        self._freed.give_back(report.push_bytes + report.pull_bytes)
        if report.step % _SAMPLED_STEPS == 1:
            self.replica.sample()
        if not self._synchronous:
            self._groups.warn_of_momentum(self.run.live_workers)

    def _exchange_last_buffers(self) -> None:
        self.totals.buffer_bytes += self._exchange_buffers(self._samples_since_exchange)
        self._samples_since_exchange = 0

    # A push

    @property
    def _next_step(self) -> int:
        """The number of the push that opens next; a worker that comes back goes on from the last one of its name."""
        return max(self.number + 1, self.run.first_step)

    def _open(self, samples: int, rates: Rates) -> StepReport:
        """Begin the push of a new step at every shard; the last push must be answered.

        A push without ``samples``, a flush, is told from others by that; it leaves what earlier pushes owe to the next.
        """
        self._samples_since_exchange += samples
        self.totals.samples += samples
        self.number = self._next_step
        if self.merged is not None:
            self.merged.opened()
        offsets, run = self._model.layout.offsets, self.run
        self._spans = [Span(offsets[group.start], offsets[group.stop]) for group in self.grouping.groups]
        finished = run.progress.open_push(samples) if run.progress is not None else []
        loss = None
        if samples:  # not a flush, whose push may be the last
            loss, self.loss = self.loss, None
        self._places = []
        for shard in self._shards:
            parts = {number: span.intersect(shard.span) for number, span in enumerate(self._spans)}
            parts = {number: part for number, part in parts.items() if part.length}
            header = pb.PushHeader(
                identity=run.identity,
                step=self.number,
                samples=samples + self._owed_samples[shard.index] if samples else 0,
                learning_rate=rates.carried,
                group_rates=rates.of_groups,
                finished=finished if shard is run.coordinator else [],
                loss=loss if shard is run.coordinator else None,
            )
            shard.open_push(header, list(parts.values()), run.settings.deadline_seconds)
            self._pushed_samples[shard.index] = header.samples
            if samples:
                self._owed_samples[shard.index] = 0
            self._places.append({number: place for place, number in enumerate(parts)})
        return StepReport(self.number)

    def send_gradients(
        self, report: StepReport, number: int, gradients: Gradients, scale: Scale, sent: Sent | None = None
    ) -> None:
        """Accumulate the gradients of a group (finite, by position) times ``scale``, select, and send the selected.

        ``sent``: what was selected of this group before the push was opened.
        """
        if sent is None:
            with report.timed("select"):
                sent = self.selector.compress(self.grouping.groups[number], gradients, scale, report)
        self._send(report, number, sent.slices)
        if self.merged is not None:
            self.merged.sent(number, sent.entries)

    def _send_residuals(self, report: StepReport, number: int) -> None:
        """Send the residuals of a group whole, in fp32: a flush must leave nothing behind."""
        with report.timed("select"):
            sent = self.selector.take_residuals(self.grouping.groups[number])
        self._send(report, number, sent, exact=True)

    def _send(self, report: StepReport, number: int, sent: Iterable[SparseSlice], *, exact: bool = False) -> None:
        """Encode a group's entries, and pass the chunks to the transport; quantisation errors are restored.

        The values are overwritten by those that arrive. After an error the shards know all of these entries, for
        :meth:`abandon_push`.
        """
        segments = joined(self._spans[number], sent)
        waiting = [
            (shard, places[number], part)
            for shard, places in zip(self._shards, self._places, strict=True)
            for segment in segments
            if (inside := segment.clip(shard.span)) is not None
            for part in pieces(inside)
        ]
        chunk_bytes = self.run.run_settings.chunk_bytes
        for index, (shard, place, part) in enumerate(waiting):
            try:
                with report.timed("encode"):
                    written = shard.encode(part, place, chunk_bytes, exact=exact)
            except BaseException:
                for shard, _, part in waiting[index:]:
                    shard.hold(part)
                raise
            shard.hold(written.arriving)
            if written.lost is not None:
                self.selector.restore([written.lost], at_once=False)
            report.push_entries += written.arriving.entries
            with report.timed("send"):
                shard.send(written)

    def commit(self, report: StepReport) -> None:
        """End the push at every shard; from now on only an answer says whether it was applied."""
        for shard in self._shards:
            report.push_bytes += shard.send_commit()
        self._committed_at = time.perf_counter()

    def abandon_push(self) -> None:
        """Break off a push that has no commit yet, and restore what was selected."""
        for shard in self._shards:
            self._owe(shard)
        self.selector.abandon()
        self.restore(part for shard in self._shards for part in shard.abandon_push())

    def await_ack(self, report: StepReport) -> None:
        """Wait until each part of the push is acknowledged or refused, and restore what was refused.

        After :class:`PatienceError` some part has no answer: call again. After another error all is restored.
        """
        self._awaited_commit_at = self._committed_at
        outcome = self._outcome = self._outcome or PushOutcome()  # kept if this is interrupted
        for joins in self.run.joining_again("pushes"):
            for shard in self._shards if joins else ():
                if shard.unacked is not None and shard.unacked.generation != shard.generation:
                    self._refuse(shard, outcome)
            waiting = [shard for shard in self._shards if shard.unacked is not None]
            answers = self.run.each(waiting, lambda shard: shard.await_ack(self.run.policy()))
            rejoin = [self._take_answer(*each, outcome) for each in zip(waiting, answers, strict=True)]
            if not any(rejoin):
                break
        self._outcome = None
        if outcome.refused:
            self.restore(outcome.refused)
            report.refused = len(outcome.refused)
            self.refused += report.refused
        if outcome.answers:
            self.acknowledged_step = self.number
            report.version = report.version or outcome.answers[0].version  # a flush has no reply that tells it
            report.staleness = max(answer.staleness for answer in outcome.answers)
        if self.merged is not None and len(outcome.answers) == len(self._places):
            pairs = zip(self._places, self._shards, strict=True)
            self.merged.answered([(places, shard.group_bytes, shard.group_arrivals) for places, shard in pairs])
        if outcome.error is not None:
            raise from_refusal(outcome.error) from None

    def _take_answer(self, shard: ShardStream, answer: pb.PushSparseResponse | Rejected, outcome: PushOutcome) -> bool:
        """Add a shard's answer to the outcome of a push; return whether the worker must join again."""
        run = self.run
        if isinstance(answer, pb.PushSparseResponse):
            outcome.answers.append(answer)
            if shard is run.coordinator and run.progress is not None:
                run.progress.acknowledged()
            run.live_workers = max(1, answer.live_workers)
            run.run_finished |= answer.run_state == pb.RUN_STATE_FINISHED
            return False
        if answer.reason in (ErrorCode.LEASE_EXPIRED, ErrorCode.STALE_GENERATION):
            return True  # the same part is repeated after joining, if it belongs to the model that is there
        self._refuse(shard, outcome)
        if answer.reason in REJOIN_REASONS:
            if answer.reason is ErrorCode.VERSION_IN_FUTURE:
                shard.forget_base()
            return True
        if answer.reason is ErrorCode.RUN_FINISHED:
            run.run_finished = True
        elif answer.reason is not ErrorCode.TOO_STALE:
            outcome.error = answer
        return False

    def _refuse(self, shard: ShardStream, outcome: PushOutcome) -> None:
        assert shard.unacked is not None
        outcome.refused.append(shard.unacked)
        shard.unacked = None
        self._owe(shard)

    def _owe(self, shard: ShardStream) -> None:
        """Let the next push to this shard count the samples of the last one, which the shard has not applied."""
        self._owed_samples[shard.index] += self._pushed_samples[shard.index]
        self._pushed_samples[shard.index] = 0

    def unacked_parts(self) -> list[PushPart]:
        """Return the parts of the last push that have no answer, or were refused and are not restored."""
        refused = self._outcome.refused if self._outcome is not None else []
        return refused + [shard.unacked for shard in self._shards if shard.unacked is not None]

    def restore(self, parts: Iterable[PushPart]) -> None:
        """Add parts that were not applied to the residuals again."""
        self.selector.restore(segment for part in parts for segment in part.segments)

    # A pull

    def ask(self) -> None:
        """Ask for the reply to the committed push ahead of its answer; :meth:`fetch` reads the reply."""
        for shard in self._shards:
            with suppress(ValueError):  # a channel that is closed: the fetch reports it
                shard.ask(self.run.identity, self.number, self.run.settings.deadline_seconds)

    def fetch(self) -> Replies:
        """Fetch the changes that the replica lacks from every shard; change nothing yet.

        If the tensors are with several ranks, a reply of everything is written as it comes, one shard after another.
        """
        done: Replies = {}
        for _ in self.run.joining_again("pulls"):
            waiting = [
                shard
                for shard in self._shards
                if shard.index not in done or done[shard.index].generation != shard.generation
            ]
            answers: list[PulledReply | Rejected] = []
            spills = any(shard.spill is not None and not shard.has_base for shard in waiting)
            for part in [[shard] for shard in waiting] if spills else [waiting]:
                answers += self.run.each(part, lambda shard: shard.pull(self.run.identity, self.run.policy()))
            for shard, answer in zip(waiting, answers, strict=True):
                if isinstance(answer, PulledReply):
                    done[shard.index] = answer
                elif answer.reason not in REJOIN_REASONS:
                    raise from_refusal(answer)
                elif answer.reason is ErrorCode.VERSION_IN_FUTURE:
                    shard.forget_base()
            if not any(isinstance(answer, Rejected) for answer in answers):
                break
        return done

    def apply(self, report: StepReport, replies: Replies) -> None:
        """Write the replies into the parameters and count them."""
        with report.timed("apply"):
            self._write(report, replies)

    def _write(self, report: StepReport, replies: Replies) -> None:
        """Write replies into the replica, but those of a generation that the shard has left since; count all."""
        for index, reply in replies.items():
            shard = self._shards[index]
            if reply.generation != shard.generation:
                continue
            if reply.header.mode == pb.REPLY_MODE_TOPK:
                if not shard.replica_is_image:
                    raise ServerFaultError(f"{shard.address} sent differences to a replica of which it has no image")
                shard.forget_base()  # until all is added: after an interruption nothing may be added a second time
                self.replica.add(reply.segments)
            else:
                self.replica.write(reply.segments)
                if reply.header.image:
                    self.replica.open_fp32(shard.span)
            self.run.run_finished |= reply.header.run_state == pb.RUN_STATE_FINISHED
            shard.note_applied(reply)
        first = replies[0].header
        report.version = first.version
        report.reply_mode = "topk" if first.mode == pb.REPLY_MODE_TOPK else "exact"
        report.changed_density = first.changed_density
        report.pull_bytes = sum(reply.bytes for reply in replies.values())
        report.pull_entries = sum(reply.spilled + entries(reply.segments) for reply in replies.values())
        if self._awaited_commit_at:  # a push has been answered
            report.round_trip_seconds = max(reply.arrived for reply in replies.values()) - self._awaited_commit_at
