"""Elastic data: a sampler whose shares come from the server, so that workers may come and go within an epoch."""

import time
from collections import deque
from collections.abc import Iterator, Sized

from torch.utils.data import Sampler

from psclient.data.lease import Granted, SampleLease
from psclient.data.permutation import shuffled
from psclient.data.tracker import Piece, joined, share_of
from psclient.errors import ConfigurationError, EpochHeldUpError
from psclient.optim.base import ParameterServerOptimizer
from pscore.model.ranges import Ranges

_MOST_SIZE, _MOST_LEASE, _MOST_SEED = 1 << 48, 1 << 24, 1 << 64
_STRETCH = 1024  # places whose samples are computed at once


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
    goes to the others. ``docs/elastic.md`` says what is promised.

    There is no ``len()``: how many samples come to this worker depends on the others.

    Args:
        data: the dataset, or its number of samples.
        optimizer: the one that trains on these samples; made with ``model=``, at whose calls they are counted.
        seed: of the order; the same on all workers.
        lease_samples: leased at once, at most; near the end of an epoch it is less, so that nobody waits for long.
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
        """Prepare; the first share is leased when the first sample is drawn."""
        size = data if isinstance(data, int) else len(data)
        for what, value, least, most in (
            ("data", size, 1, _MOST_SIZE),
            ("lease_samples", lease_samples, 1, _MOST_LEASE),
            ("seed", seed, 0, _MOST_SEED - 1),
        ):
            if not least <= value <= most:
                raise ConfigurationError(f"{what} is {value}; it must be {least} to {most}")
        if not isinstance(optimizer, ParameterServerOptimizer):
            raise ConfigurationError(
                f"ElasticSampler needs a method with a server, as psclient.DGS, not {type(optimizer).__name__}"
            )
        if optimizer._model.module is None:
            raise ConfigurationError(
                "this optimizer was made without model=, so it does not know which samples a step has trained; pass it"
            )
        self._optimizer = optimizer
        self._progress = optimizer._cluster.progress
        self._lease = SampleLease(optimizer._cluster, name, size, seed, shuffle)
        self._lease_samples, self._seed, self._shuffle = lease_samples, seed, shuffle
        self._undrawn: deque[Piece] = deque()
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
        goal = self._goal
        if goal is None:
            goal = self._ask(None).epoch
        while goal < count:
            handed_in = self._hand_in()
            more = self._await_samples(goal)
            if (handed_in or self._optimizer._rounds is not None) and not self._optimizer.finished:
                self._optimizer.pull()  # what was flushed, and the rounds of those who had more samples
            if more:
                self._goal = goal
                yield goal
            elif self._optimizer.finished:
                return
            else:
                goal += 1

    def __iter__(self) -> Iterator[int]:
        """Draw this worker's samples until nothing of the epoch is left to hand out; the next pass is the next epoch.

        Samples that were drawn before and not trained come first (``drop_last``, a loop that was left), then those of
        earlier epochs that have come back from workers that are gone.

        Raises:
            SettingsMismatchError: another worker has another dataset, seed or ``shuffle`` under this name.
            ServerUnreachableError: no server within the patience; iterate again to go on, nothing is lost.
            EpochHeldUpError: others hold samples of so many earlier epochs that the server begins no other.
        """
        self._pass += 1
        this_pass = self._pass
        waiting = self._optimizer._stepper.samples_waiting
        self._undrawn.extendleft(reversed(self._progress.put_back(self._lease.dataset, waiting)))
        goal = self._first_goal() if self._goal is None else self._goal
        while self._replenish(goal):
            for sample in self._stretch():
                yield sample
                if self._pass != this_pass:  # another loop has taken over
                    return
                if self._lease.in_question:
                    break
        self._goal = goal + 1

    # Inner parts

    def _first_goal(self) -> int:
        """Return the epoch to begin with: the run's, or the one after it where nothing of it is left."""
        granted = self._ask(None)
        return granted.epoch if self._undrawn else granted.epoch + 1

    def _replenish(self, goal: int) -> bool:
        """Make sure that there is something to draw; tell whether there is."""
        if self._lease.in_question:
            self._ask(goal, samples=0)
        if not self._undrawn:
            granted = self._ask(goal)
            if not self._undrawn and granted.epoch < goal and not self._optimizer.finished:
                raise EpochHeldUpError(granted.epoch, granted.elsewhere, 0.0)  # far behind: many epochs are unfinished
        return bool(self._undrawn)

    def _stretch(self) -> Iterator[int]:
        """Draw the first places of what is undrawn, no more than their samples are computed for."""
        piece = self._undrawn[0]
        places = range(piece.start, min(piece.end, piece.start + _STRETCH))
        samples = list(places)
        if self._shuffle:
            samples = shuffled(self._lease.size, self._seed, piece.epoch, places.start, places.stop)
        for place, sample in zip(places, samples, strict=True):
            piece.start, self._epoch = place + 1, piece.epoch
            if piece.start == piece.end:
                self._undrawn.popleft()
            self._progress.draw(self._lease.dataset, piece.epoch, place)
            yield sample

    def _hand_in(self) -> bool:
        """Give nobody a reason to wait for this worker: end the last push, and send again what was refused.

        Returns:
            Whether local steps were handed in.
        """
        local = self._optimizer.local_steps > 0
        if local:
            self._optimizer.flush_on_exit()
        for send in (self._optimizer.pull, self._optimizer.flush):
            if not self._progress.is_settled:
                send()
        return local

    def _await_samples(self, goal: int) -> bool:
        """Wait until there are samples of an epoch for this worker, or all that others hold are finished."""
        patience_seconds = self._optimizer._membership.settings.patience_seconds
        heard, since = -1, time.monotonic()
        while not self._undrawn and not self._optimizer.finished:
            answer = self._ask(goal)
            if self._undrawn:
                break
            if not answer.elsewhere:
                return False
            if answer.elsewhere != heard:
                heard, since = answer.elsewhere, time.monotonic()
            elif time.monotonic() - since > patience_seconds:
                raise EpochHeldUpError(goal, heard, patience_seconds)
            time.sleep(answer.retry_seconds)
        return bool(self._undrawn)

    def _ask(self, goal: int | None, samples: int | None = None) -> Granted:
        """Lease more, and forget what is no longer this worker's."""
        held = joined(self._progress.held(self._lease.dataset), share_of(self._undrawn))
        wanted = self._lease_samples if samples is None else samples
        granted = self._optimizer._worker.run(lambda: self._lease.ask(goal, wanted, held))
        kept = [
            Piece(piece.epoch, start, end)
            for piece in self._undrawn
            for start, end in Ranges([(piece.start, piece.end)]) - granted.lost.get(piece.epoch, Ranges())
        ]
        self._undrawn = deque([*kept, *granted.pieces])
        return granted
