"""The call by which a worker asks shard 0 for samples, and for what has become of those that it leases."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from psclient.data.tracker import IndexRange, SampleSet, sample_set
from psclient.errors import LeaseLostError, ServerFaultError, from_refusal
from psclient.rpc.cluster import Cluster
from psclient.rpc.shard import REJOIN_REASONS
from pscore.model.ranges import Ranges
from pscore.wire.errors import Rejected
from pscore.wire.messages import share_to_messages
from pscore.wire.v1 import parameter_server_pb2 as pb

_MOST_REJOINS = 20  # in one call; each may wait, so this is a guard against a loop, not a time limit


@dataclass(frozen=True, slots=True)
class Granted:
    """An answer: what this worker is to train, in order, and what is lost of the samples that it leased.

    ``epoch`` is the newest that has begun; ``held_by_others`` counts unfinished samples of the epochs asked for; after
    ``retry_seconds`` a worker that got nothing asks again.
    """

    ranges: list[IndexRange]
    lost: SampleSet
    epoch: int
    held_by_others: int
    retry_seconds: float


class SampleLease:
    """Asks for samples of one dataset; ``seed`` and ``shuffle`` are those of its order."""

    def __init__(self, cluster: Cluster, dataset: str, size: int, seed: int, shuffle: bool) -> None:
        self.dataset, self.size = dataset, size
        self._membership = cluster.membership
        self._seed, self._shuffle = seed, shuffle
        self._joins = self._membership.joins

    @property
    def stale(self) -> bool:
        """True where the worker has joined again since the last answer: its samples may be others' now."""
        return self._joins != self._membership.joins

    def ask(self, epoch: int | None, samples: int, held: Mapping[int, Ranges]) -> Granted:
        """Ask for samples of epochs up to ``epoch`` (``None``: the newest that has begun).

        Args:
            epoch: the newest that is wanted.
            samples: at most so many; 0 asks only what is lost.
            held: everything that this worker leases.
        """
        for _ in range(_MOST_REJOINS):
            joins = self._membership.joins
            answer = self._call(epoch, samples, held)
            if isinstance(answer, pb.LeaseSamplesResponse):
                self._joins = joins
                self._membership.run_finished |= answer.run_state == pb.RUN_STATE_FINISHED
                granted, lost = self._ranges(answer.granted), sample_set(self._ranges(answer.lost))
                return Granted(granted, lost, answer.epoch, answer.samples_elsewhere, answer.retry_seconds)
            if answer.reason not in REJOIN_REASONS:
                raise from_refusal(answer)
            self._membership.join()
        raise LeaseLostError("the server takes the worker in and refuses it samples again and again")

    def _call(self, epoch: int | None, samples: int, held: Mapping[int, Ranges]) -> pb.LeaseSamplesResponse | Rejected:
        coordinator = self._membership.coordinator
        request = pb.LeaseSamplesRequest(
            identity=self._membership.identity,
            dataset=self.dataset,
            size=self.size,
            seed=self._seed,
            shuffle=self._shuffle,
            has_epoch=epoch is not None,
            epoch=epoch or 0,
            samples=samples,
            held=share_to_messages(held),
        )
        return coordinator.connection.ask(
            self._membership.patience(coordinator),
            lambda seconds: coordinator.connection.stub.LeaseSamples.future(request, timeout=seconds),
            lambda call: call.result(),
        )

    def _ranges(self, messages: Iterable[pb.SampleRange]) -> list[IndexRange]:
        found = [IndexRange(each.epoch, each.start, each.start + each.count) for each in messages]
        if any(part.start >= part.end or part.end > self.size for part in found):
            raise ServerFaultError(
                f"{self._membership.coordinator.address} speaks of samples that {self.dataset!r} does not have"
            )
        return found
