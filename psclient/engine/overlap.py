"""Overlap: pushing while backward goes on, and fetching the reply while the next step computes.

A gradient hook submits a group the moment its last gradient is ready; one thread selects, encodes and sends the group.
At the end of a step a second thread awaits the acknowledgement and fetches the reply, which is applied at the end of
the *next* step: parameters never change under a forward or backward pass, and each gradient is one step staler.
In rounds (MGS-SGD, LAGS-SGD as published) a step awaits and applies its own reply: nothing is staler.

::

    main      forward t │ backward t           │ step t │ forward t+1 │ backward t+1        │ step t+1
    compress            │ group 1, 2, … commit │        │             │ group 1, 2, …       │
    exchange   … reply t−1                     │ ack of t, reply t ─────────────────────────▶ applied
"""

import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from psclient.compress.gradients import finite
from psclient.compress.groups import ParamGroups
from psclient.engine.mgs import GradientClock
from psclient.errors import ConfigurationError, PatienceError
from psclient.executor import Job, Result, SerialExecutor, current_streams, devices_of, entered, is_cancelled
from psclient.model.module import TrainedModel
from psclient.report import StepReport

if TYPE_CHECKING:
    from psclient.engine.engine import Engine, Replies

_CLOSING_SECONDS = 10.0
_POLL_SECONDS = 0.05


class Overlap:
    """Drives pushes and pulls from gradient hooks; ``begin`` opens a push, on the compressing thread."""

    def __init__(
        self,
        model: TrainedModel,
        groups: ParamGroups,
        engine: "Engine",
        gather: Callable[[range], Mapping[int, torch.Tensor]],
        begin: Callable[[], StepReport],
    ) -> None:
        self._owner = os.getpid()
        self._model, self._groups, self._engine = model, groups, engine
        self._gather, self._begin = gather, begin
        self._compressing, self._exchanging = SerialExecutor("psclient-compress"), SerialExecutor("psclient-exchange")
        self._paused = False
        self._counting = threading.Lock()
        """Owned where gradients are counted: autograd calls hooks in a thread for each device."""
        self._report: StepReport | None = None  # of the push that is open
        self._ack: Job[None] | None = None  # of the last committed push
        self._reply: Job[Replies] | None = None  # to that push
        devices = {parameter.device for parameter in self._trained().values()}
        self._devices = devices_of(self._trained().values())
        self._streams = [torch.cuda.Stream(device) for device in self._devices]  # type: ignore[no-untyped-call]
        self._clock = None  # which is needed to merge gradients
        if engine.merged is not None:
            self._clock = GradientClock(self._devices[0] if len(self._devices) == len(devices) == 1 else None)
        self._handles: dict[int, RemovableHandle] = {}
        self._commit_job: Job[StepReport | None] | None = None
        self._reset()
        self._count_members()

    @property
    def in_child(self) -> bool:
        """True in a process forked from the one that made it: the threads are not there."""
        return os.getpid() != self._owner

    @property
    def begun(self) -> bool:
        """True from the first gradient of a backward pass until the step's end."""
        return bool(self._seen)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Leave the gradients of the backward passes in the body alone: they are not the step's last."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def finish(self) -> StepReport:
        """Send the groups that no hook has completed, commit the push, and wait until the transport has all of it.

        After an error the push is broken off, and its groups are in the residuals. After :class:`TimeoutError` (the
        calling job is cancelled) a second call continues.
        """
        if any(gradient._version != version for gradient, version in self._versions):
            self.forget()
            raise ConfigurationError(
                "a gradient was changed between backward() and step() (clipping, GradScaler); with overlap=True it was "
                "handed over during backward, as it was then. Leave overlap out, or change it in a hook of the loss"
            )
        for number in range(len(self._engine.grouping.groups)):
            if number not in self._jobs:
                self._submit(number)
        self._commit_job = self._commit_job or self._compressing.submit(lambda: self._launching(self._commit))
        _await(self._commit_job)  # the last of the push's jobs
        jobs, committed = list(self._jobs.values()), self._commit_job
        self._reset()
        for job in jobs:
            job.result()  # raises the job's error
        report = committed.result()
        assert report is not None
        return report

    def launch(self, report: StepReport) -> None:
        """Begin to wait for the push's acknowledgement and to fetch its reply."""
        self._engine.ask()
        ack = self._ack = self._exchanging.submit(lambda: self._launching(lambda: self._engine.await_ack(report)))

        def fetch() -> "Replies":
            ack.result()
            return self._engine.fetch()

        self._reply = self._exchanging.submit(fetch)

    def collect(self, seconds: float | None = None) -> "Replies | None":
        """Wait for the reply to the last step's push and return it; ``None`` if none is awaited.

        After :class:`TimeoutError` (``seconds`` have passed, or the calling job is cancelled) it is still awaited.
        """
        if self._reply is None:
            return None
        _await(self._reply, seconds)
        awaited, self._reply, self._ack = self._reply, None, None
        return awaited.result()

    def break_off(self, seconds: float | None = None) -> None:
        """Restore a push that has begun and has no commit.

        The gradients of sent groups are then in the residuals, and the step omits these groups; groups that could not
        be sent (no server, a gradient that is not finite) are submitted again by the step.
        """
        for number, job in list(self._jobs.items()):
            if job.exception(seconds) is not None or not job.result():
                del self._jobs[number]
        self._compressing.submit(lambda: self._launching(self._abandon)).result(seconds)

    def forget(self) -> None:
        """Break off a step that has begun, and begin the next as if this one had not been."""
        if self.in_child or not self.begun:
            return
        self.break_off()
        self._reset()

    def close(self) -> None:
        """Remove the hooks and stop the threads."""
        for handle in self._handles.values():
            handle.remove()
        self._compressing.close(_CLOSING_SECONDS)
        self._exchanging.close(_CLOSING_SECONDS)

    def ready(self, position: int) -> None:
        """Note that a gradient is whole; called by its hook, during backward."""
        if self._paused:
            return
        current_streams(())  # raises while a CUDA graph is captured
        with self._counting:
            if position in self._seen:
                raise ConfigurationError(self._why_again(position))
            if not self._seen:
                self._count_members()
            self._seen.add(position)
            if self._clock is not None:
                self._clock.note(position)
            if (device := self._model.parameters[position].device) in self._devices:
                self._used.add(torch.cuda.current_stream(device))
            number = self._group_of[position]
            self._missing[number] -= 1
            is_whole = not self._missing[number] and number not in self._jobs
        if is_whole:
            self._submit(number)

    def _why_again(self, position: int) -> str:
        """Say why a gradient that was handed over is handed over again."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code.co_name == "backward" and frame.f_globals.get("__name__") == "torch.utils.checkpoint":
                return (
                    f"torch.utils.checkpoint with use_reentrant=True runs a backward for each of its segments, and "
                    f"{self._model.layout.parameters[position].name!r} is used in several: with overlap=True its "
                    "gradient was handed over after the first. Pass use_reentrant=False to checkpoint(), or leave "
                    "overlap out"
                )
            frame = frame.f_back
        return (
            "with overlap=True gradients are handed over during backward, and this is a second backward before "
            "step(); wrap all but the last in `with optimizer.accumulating():`, or skip a batch with "
            "optimizer.zero_grad()"
        )

    def _reset(self) -> None:
        """Begin a step."""
        self._jobs: dict[int, Job[bool]] = {}
        self._commit_job = None
        self._seen: set[int] = set()
        self._used: set[torch.cuda.Stream] = set()  # by the hooks: those of the backward pass
        self._versions: list[tuple[torch.Tensor, int]] = []
        if self._clock is not None and self._engine.merged is not None:
            self._engine.merged.note_gradients(self._clock.take())

    def _trained(self) -> dict[int, torch.Tensor]:
        return {
            position: parameter
            for position, parameter in enumerate(self._model.parameters)
            if parameter.requires_grad and parameter in self._groups
        }

    def _count_members(self) -> None:
        """Count each group's trained parameters as they are now, and hook those that were frozen before."""
        trained = self._trained()
        for position, parameter in trained.items():
            if position not in self._handles:
                hook = _hook(self, position)
                self._handles[position] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._group_of = {position: n for n, group in enumerate(self._engine.grouping.groups) for position in group}
        self._missing = [sum(position in trained for position in group) for group in self._engine.grouping.groups]

    def _submit(self, number: int) -> None:
        """Have a group sent by the compressing thread, after what backward and this thread have on CUDA streams."""
        with self._counting:  # another thread may add a stream
            used = set(self._used)
        streams = used | {torch.cuda.current_stream(device) for device in self._devices}
        events = [stream.record_event() for stream in streams]
        gradients = self._gather(self._engine.grouping.groups[number])
        self._versions.extend((gradient, gradient._version) for gradient in gradients.values())
        self._jobs[number] = self._compressing.submit(
            lambda: self._launching(lambda: self._send(number, gradients), events)
        )

    @torch.no_grad()
    def _launching(self, work: Callable[[], Result], events: Iterable[torch.cuda.Event] = ()) -> Result:
        """Do work in the streams of overlap, after ``events``; what it has launched is done then: others may read."""
        with entered(self._streams):
            for stream in self._streams:
                for event in events:
                    stream.wait_event(event)
            try:
                return work()
            finally:
                for stream in self._streams:
                    stream.synchronize()

    def _send(self, number: int, gradients: Mapping[int, torch.Tensor]) -> bool:
        """Send a group; return False if the group was left because another one has failed."""
        if self._has_failed():
            return False
        report = self._opened()
        try:
            self._engine.send_gradients(report, number, finite(self._model, gradients), 1.0)
        except BaseException:
            self._abandon()
            raise
        return True

    def _commit(self) -> StepReport | None:
        if self._has_failed():
            return None
        report = self._opened()
        self._engine.commit(report)
        self._report = None  # only an answer ends the doubt now: an interrupted step must not restore the push
        return report

    def _abandon(self) -> None:
        """Break off the push that is open, if there is one; on the compressing thread, so after what was submitted."""
        if self._report is not None:
            self._report = None
            self._engine.abandon_push()

    def _has_failed(self) -> bool:
        return any(job.finished and job.exception() is not None for job in list(self._jobs.values()))

    def _opened(self) -> StepReport:
        """Return the report of the open push; open one if there is none.

        The error of an earlier push without an answer is raised once, here; the next attempt has new patience.
        """
        if self._report is None:
            error = None if self._ack is None else self._ack.exception()
            if isinstance(error, PatienceError):
                self._ack = self._reply = None
                raise error
            self._report = self._begin()
        return self._report


def _await(job: Job[Any], seconds: float | None = None) -> None:
    """Wait for a job's end; :class:`TimeoutError` after ``seconds``, or if the calling job is cancelled."""
    end = math.inf if seconds is None else time.monotonic() + seconds
    while not job.wait(min(_POLL_SECONDS, end - time.monotonic())):
        if is_cancelled() or time.monotonic() >= end:
            raise TimeoutError
    if is_cancelled():
        raise TimeoutError


def _hook(overlap: Overlap, position: int) -> Callable[[torch.Tensor], None]:
    """Make a hook that does not keep the optimizer alive."""
    reference = weakref.ref(overlap)

    def hook(_: torch.Tensor) -> None:
        alive = reference()
        if alive is not None and not alive.in_child:  # a forked child's gradients are its own
            alive.ready(position)

    return hook
