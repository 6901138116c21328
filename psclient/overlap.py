"""Overlap: pushing while backward goes on, and fetching the reply while the next step computes.

Gradient hooks hand a group over the moment its last gradient is ready; one thread selects, encodes and sends it. At the
end of a step a second thread waits for the acknowledgement and fetches the reply, which is applied at the end of the
*next* step: parameters never change under a forward or backward pass, and each gradient is one step staler.

::

    main      forward t │ backward t           │ step t │ forward t+1 │ backward t+1        │ step t+1
    compress            │ group 1, 2, … commit │        │             │ group 1, 2, …       │
    exchange   … reply t−1                     │ settle t, reply t ─────────────────────────▶ applied
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from psclient.errors import ConfigurationError
from psclient.exchange import Exchange, Replies
from psclient.gradients import Gradients
from psclient.jobs import JobThread
from psclient.report import StepReport

_CLOSING_SECONDS = 10.0


class Overlap:
    """Drives an exchange from gradient hooks.

    Args:
        exchange: what is driven.
        parameters: trained parameters by position in the layout.
        begin: opens the push of a new step; called on the compressing thread.
        gather: collects the gradients of a group, at once.
        finite: checks them; called on the compressing thread.
    """

    def __init__(
        self,
        exchange: Exchange,
        parameters: Mapping[int, torch.Tensor],
        begin: Callable[[], StepReport],
        gather: Callable[[range], Gradients],
        finite: Callable[[Gradients], Gradients],
    ) -> None:
        """Register the hooks and start the threads."""
        self._exchange = exchange
        self._begin, self._gather, self._finite = begin, gather, finite
        self._compressing, self._exchanging = JobThread("psclient-compress"), JobThread("psclient-exchange")
        self._group_of = {position: n for n, group in enumerate(exchange.groups) for position in group}
        self._members = [sum(position in parameters for position in group) for group in exchange.groups]
        self._paused = False
        self._report: StepReport | None = None
        self._round: Future[Replies] | None = None
        self._settled = threading.Event()
        self._settled.set()
        self._reset()
        device = next((p.device for p in parameters.values() if p.is_cuda), None)
        self._stream = None if device is None else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._handles = [
            parameter.register_post_accumulate_grad_hook(_hook(self, position))  # type: ignore[no-untyped-call]
            for position, parameter in parameters.items()
        ]

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Leave the gradients of the backward passes in the body alone: they are not the step's last."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def finish(self) -> StepReport:
        """Send the groups that no hook has completed, commit the push, and wait until all is handed over.

        Raises:
            NonFiniteGradientError: the push is broken off; groups before it have kept their gradients as residual.
            SparsepsError: the push before this one is in doubt still.
        """
        for number in range(len(self._exchange.groups)):
            if number not in self._handed:
                self._hand_over(number)
        self._jobs.append(self._compressing.submit(self._commit))
        errors = [error for job in self._jobs if (error := job.exception()) is not None]
        report, self._report = self._report, None
        self._reset()
        if errors:
            raise errors[0]
        assert report is not None
        return report

    def launch(self, report: StepReport) -> None:
        """Begin to wait for the push's acknowledgement and to fetch its reply."""
        self._settled.clear()

        def job() -> Replies:
            try:
                self._exchange.settle(report)
            finally:
                self._settled.set()
            return self._exchange.fetch()

        self._round = self._exchanging.submit(job)

    def collect(self) -> Replies | None:
        """Wait for the reply to the last step's push and return it; ``None`` if none is awaited.

        Raises:
            SparsepsError: what settling or fetching has met.
        """
        awaited, self._round = self._round, None
        return None if awaited is None else awaited.result()

    def break_off(self) -> None:
        """Take a push back that has begun and has no commit; its gradients stay accumulated."""
        for job in self._jobs:
            job.exception()
        self._jobs.clear()
        if self._report is not None:
            self._compressing.submit(self._exchange.abandon).result()
            self._report = None

    def close(self) -> None:
        """Remove the hooks and stop the threads."""
        for handle in self._handles:
            handle.remove()
        self._compressing.close(_CLOSING_SECONDS)
        self._exchanging.close(_CLOSING_SECONDS)

    def _reset(self) -> None:
        self._jobs: list[Future[None]] = []
        self._handed: set[int] = set()
        self._seen: set[int] = set()
        self._missing = list(self._members)

    def ready(self, position: int) -> None:
        """Note that a gradient is whole; called by its hook, during backward."""
        if self._paused:
            return
        if position in self._seen:
            raise ConfigurationError(
                "with overlap=True gradients are handed over during backward, and this is a second backward before "
                "step(); wrap all but the last in `with optimizer.accumulating():`"
            )
        self._seen.add(position)
        number = self._group_of[position]
        self._missing[number] -= 1
        if not self._missing[number]:
            self._hand_over(number)

    def _hand_over(self, number: int) -> None:
        self._handed.add(number)
        event = None
        if self._stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        gradients = self._gather(self._exchange.groups[number])
        self._jobs.append(self._compressing.submit(lambda: self._send(number, gradients, event)))

    @torch.no_grad()
    def _send(self, number: int, gradients: Gradients, ready: "torch.cuda.Event | None") -> None:
        if self._failed():
            return
        report = self._opened()
        try:
            with _after(ready, self._stream):
                self._exchange.send_gradients(report, number, self._finite(gradients), 1.0)
        except BaseException:
            self._report = None
            self._exchange.abandon()
            raise

    def _commit(self) -> None:
        if not self._failed():
            self._exchange.commit(self._opened())

    def _failed(self) -> bool:
        return any(job.done() and job.exception() is not None for job in self._jobs)

    def _opened(self) -> StepReport:
        """Return the report of the push that is open, and open one if there is none."""
        if self._report is None:
            self._settled.wait()
            self._report = self._begin()
        return self._report


def _hook(overlap: Overlap, position: int) -> Callable[[torch.Tensor], None]:
    """Make a hook that does not keep the optimizer alive."""
    reference = weakref.ref(overlap)

    def hook(_: torch.Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.ready(position)

    return hook


@contextmanager
def _after(ready: "torch.cuda.Event | None", stream: "torch.cuda.Stream | None") -> Iterator[None]:
    """Run the body on a stream of its own, after an event; on the host there is nothing to order."""
    if ready is None or stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        yield
