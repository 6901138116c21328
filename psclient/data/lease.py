"""The call by which a worker asks shard 0 for samples, and for what has become of those that it leases."""

from psclient.data.tracker import SampleSet
from psclient.errors import LeaseLostError, ServerFaultError, from_refusal
from psclient.rpc.cluster import Cluster
from psclient.rpc.shard import REJOIN_REASONS
from pscore.wire.errors import Rejected
from pscore.wire.messages import share_to_messages
from pscore.wire.v1 import parameter_server_pb2 as pb

_MOST_REJOINS = 20  # in one call; each may wait, so this is a guard against a loop, not a time limit


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

    def ask(self, epoch: int | None, samples: int, held: SampleSet) -> pb.LeaseSamplesResponse:
        """Ask for samples; the answer says what is granted, and what is lost of those that this worker leases.

        Args:
            epoch: the newest that is wanted; ``None`` for the newest that has begun.
            samples: at most so many; 0 asks only what is lost.
            held: everything that this worker leases.
        """
        for _ in range(_MOST_REJOINS):
            joins = self._membership.joins
            answer = self._call(epoch, samples, held)
            if isinstance(answer, pb.LeaseSamplesResponse):
                self._joins = joins
                self._membership.run_finished |= answer.run_state == pb.RUN_STATE_FINISHED
                if any(not 0 < each.count <= self.size - each.start for each in (*answer.granted, *answer.lost)):
                    address = self._membership.coordinator.address
                    raise ServerFaultError(f"{address} speaks of samples that {self.dataset!r} does not have")
                return answer
            if answer.reason not in REJOIN_REASONS:
                raise from_refusal(answer)
            self._membership.join()
        raise LeaseLostError("the server takes the worker in and refuses it samples again and again")

    def _call(self, epoch: int | None, samples: int, held: SampleSet) -> pb.LeaseSamplesResponse | Rejected:
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
