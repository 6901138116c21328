"""Elastic data: a sampler whose samples are leased from the server, so that workers may come and go within an epoch."""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sized

from torch.utils.data import Sampler

from psclient.data.given_batches import GivenBatches
from psclient.data.permutation import shuffled
from psclient.errors import (
    ConfigurationError,
    EpochHeldUpError,
    ServerFaultError,
)
from psclient.optim.base import ParameterServerOptimizer
from psclient.rpc.samples import SampleSet, SampleTracker, sample_set, union
from psclient.whole_numbers import whole_number
from pscore.model.ranges import Ranges
from pscore.wire.messages import share_to_messages
from pscore.wire.v1 import parameter_server_pb2 as pb

log = logging.getLogger("psclient")

_MOST_SIZE, _MOST_LEASE, _MOST_SEED = 1 << 48, 1 << 24, 1 << 64
_COMPUTED_AT_ONCE = 1024  # places whose samples are


class ElasticSampler(Sampler[int]):
    """Draws this worker's samples of an epoch, of which every sample is trained once, by whichever worker.

    Use it with any loader; the optimizer's steps tell how far the training is::

        sampler = psclient.ElasticSampler(dataset, optimizer)
        loader = DataLoader(dataset, batch_size=64, sampler=sampler, num_workers=4)
        for epoch in sampler.epochs(90):
            for x, y in loader:
                ...
                optimizer.step()

    A worker leases places of the epoch's order from shard 0, and asks for more when they are drawn. A sample is
    finished when the push of the step that trained it is applied. What a worker that dies or leaves has not finished
    goes to the others. The promises: ``docs/guide/elastic.md``.

    There is no ``len()``: how many samples come to this worker depends on the others.

    Args:
        data: the dataset, or its number of samples.
        optimizer: the one that trains on these samples; made with ``model=``, at whose calls they are counted.
        seed: of the order; the same on all workers.
        lease_samples: most samples leased at once; near the end of an epoch it is less, so that nobody waits for long.
        name: of the dataset in this run; the same on all workers.
        shuffle: whether each epoch has an order of its own; the same on all workers.

    Raises:
        ConfigurationError: an argument is out of its range, or the optimizer counts no samples.
    """

    def __init__(
        self,
        data: Sized | int,
        optimizer: ParameterServerOptimizer,
        *,
        seed: int = 0,
        lease_samples: int = 1024,
        name: str = "train",
        shuffle: bool = True,
    ) -> None:
        count = len(data) if isinstance(data, Sized) else data
        size = whole_number(count, "data must be a dataset or its number of samples", 1, _MOST_SIZE)
        lease_samples = whole_number(lease_samples, "lease_samples must be a number of samples", 1, _MOST_LEASE)
        seed = whole_number(seed, "seed must be a number", 0, _MOST_SEED - 1)
        if not isinstance(optimizer, ParameterServerOptimizer):
            raise ConfigurationError(
                f"ElasticSampler needs a method with a server, as psclient.DGS, not {type(optimizer).__name__}"
            )
        if not optimizer._engine.counts_samples:
            raise ConfigurationError(
                "this optimizer was made without model=, so it does not know which samples a step has trained; pass it"
            )
        self._optimizer, self._engine, self._run = optimizer, optimizer._engine, optimizer._engine.run
        self._tracker = self._run.progress = self._run.progress or SampleTracker()
        self._dataset, self._size, self._seed, self._shuffle = name, size, seed, shuffle
        self._lease_samples = lease_samples
        self._joins = self._run.joins  # of the worker, when its samples were leased
        self._undrawn: deque[pb.SampleRange] = deque()
        self._goal: int | None = None  # the epoch of the next pass; None begins with the run's
        self._pass = 0
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """The epoch of the last sample that was drawn, counted from 0."""
        return self._epoch

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the run's epochs up to ``count``, from the one it is in; iterate over a loader in the body.

        When the body is done with its samples, this waits until the others are too. If one of them dies meanwhile, its
        samples come back, and the same epoch is yielded again for another pass of the body over these.

        Raises:
            EpochHeldUpError: others hold samples and have finished none within ``PSCLIENT_PATIENCE_SECONDS``.
            SparsepsError: as :meth:`__iter__`.
        """
        goal = self._lease(None).epoch if self._goal is None else self._goal
        is_first, yields = self._goal is None, False
        while goal < count:
            pushed = self._push_all()
            more = self._await_samples(goal)
            if (pushed or self._optimizer._rounds is not None) and not self._optimizer.finished:
                self._optimizer.pull()  # the flushed residuals, and the rounds of workers that had more samples
            if more:
                self._goal, yields = goal, True
                yield goal
            elif self._optimizer.finished:
                return
            else:
                goal += 1
        if is_first and not yields:
            log.warning(
                "epochs(%d) has yielded nothing: all samples of dataset %r were trained so often before, in this run. "
                "Ask for more epochs, or for a new run start a server with another --data-dir, or without one",
                count,
                self._dataset,
            )

    def __iter__(self) -> Iterator[int]:
        """Draw this worker's samples until nothing of the epoch is left to hand out; the next pass is the next epoch.

        Samples that were drawn before and not trained come first (``drop_last``, a loop that was left), then those of
        earlier epochs that have come back from workers that are gone.

        Raises:
            SettingsMismatchError: another worker has another dataset, seed or ``shuffle`` under this name.
            ServerUnreachableError: no server within the patience; iterate again to go on, nothing is lost.
            EpochHeldUpError: others hold samples of so many earlier epochs that the server begins no other.
        """
        this_pass = self._pass = self._pass + 1
        waiting = self._engine.samples_waiting
        self._undrawn.extendleft(reversed(self._tracker.undraw(self._dataset, waiting)))
        batches = GivenBatches(self, waiting)
        self._tracker.begin_pass(batches)
        goal = self._goal
        if goal is None:  # begin with the run's epoch, or the one after it if nothing of it is left
            epoch = self._lease(None).epoch
            goal = epoch if self._undrawn else epoch + 1
        while self._replenish(goal):
            for sample in self._draw():
                batches.draw()
                yield sample
                if self._pass != this_pass:  # another loop has taken over
                    return
                if self._is_stale:
                    break
        self._goal = goal + 1

    @property
    def _is_stale(self) -> bool:
        """True if the worker has joined again since the last answer: its samples may be others' now."""
        return self._joins != self._run.joins

    def _replenish(self, goal: int) -> bool:
        """Lease more if nothing is undrawn; return whether there is something to draw."""
        if self._is_stale:
            self._lease(goal, samples=0)
        if not self._undrawn:
            answer = self._lease(goal)
            if not self._undrawn and answer.epoch < goal and not self._optimizer.finished:
                raise EpochHeldUpError(answer.epoch, answer.samples_elsewhere, 0.0)  # many epochs are unfinished
        return bool(self._undrawn)

    def _draw(self) -> Iterator[int]:
        """Draw the first undrawn places, as many as have their samples computed at once."""
        part = self._undrawn[0]
        places = range(part.start, part.start + min(part.count, _COMPUTED_AT_ONCE))
        samples = list(places)
        if self._shuffle:
            samples = shuffled(self._size, self._seed, part.epoch, places.start, places.stop)
        for place, sample in zip(places, samples, strict=True):
            part.start, part.count, self._epoch = place + 1, part.count - 1, part.epoch
            if not part.count:
                self._undrawn.popleft()
            self._tracker.draw(self._dataset, part.epoch, place)
            yield sample

    def _push_all(self) -> bool:
        """End the last push, and send refused parts again, so that nobody waits for this worker.

        Returns whether there were local steps.
        """
        has_local_steps = self._optimizer._local_steps > 0
        if has_local_steps:
            self._optimizer._flush_on_exit()
        if not self._tracker.is_settled:
            self._optimizer.pull()
        if not self._tracker.is_settled:
            self._optimizer.flush()
        return has_local_steps

    def _await_samples(self, goal: int) -> bool:
        """Wait until there are samples of an epoch for this worker, or all that others hold are finished."""
        patience_seconds = self._run.settings.patience_seconds
        last, since = -1, time.monotonic()
        while not self._undrawn and not self._optimizer.finished:
            answer = self._lease(goal, waits=True)
            if self._undrawn or not answer.samples_elsewhere:
                break
            if answer.samples_elsewhere != last:
                last, since = answer.samples_elsewhere, time.monotonic()
            elif time.monotonic() - since > patience_seconds:
                raise EpochHeldUpError(goal, last, patience_seconds)
        return bool(self._undrawn)

    def _lease(self, goal: int | None, samples: int | None = None, *, waits: bool = False) -> pb.LeaseSamplesResponse:
        """Lease more samples, ``lease_samples`` unless told, and drop those that are no longer this worker's.

        ``waits``: the answer may wait until there are some.
        """
        leased = union(self._tracker.unacked(self._dataset), sample_set(self._undrawn))
        wanted = self._lease_samples if samples is None else samples
        answer = self._engine.do(lambda: self._request_lease(goal, wanted, leased, waits))
        lost = sample_set(answer.lost)
        kept = [
            pb.SampleRange(epoch=part.epoch, start=start, count=end - start)
            for part in self._undrawn
            for start, end in Ranges([(part.start, part.start + part.count)]) - lost.get(part.epoch, Ranges())
        ]
        self._undrawn = deque([*kept, *answer.granted])
        return answer

    def _request_lease(
        self, epoch: int | None, samples: int, leased: SampleSet, waits: bool = False
    ) -> pb.LeaseSamplesResponse:
        """Ask shard 0 for up to so many samples, and which of those leased are lost; join again if that is due.

        ``epoch`` is the newest that is wanted; ``None`` for the newest that has begun.
        """
        request = pb.LeaseSamplesRequest(
            dataset=self._dataset,
            size=self._size,
            seed=self._seed,
            shuffle=self._shuffle,
            has_epoch=epoch is not None,
            epoch=epoch or 0,
            samples=samples,
            held=share_to_messages(leased),
        )
        answer, self._joins = self._run.lease_samples(request, waits=waits)
        if any(not 0 < each.count <= self._size - each.start for each in (*answer.granted, *answer.lost)):
            address = self._run.coordinator.address
            raise ServerFaultError(f"{address} speaks of samples that {self._dataset!r} does not have")
        return answer
