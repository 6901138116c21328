"""The call by which a worker asks shard 0 for samples, and for what has become of those it holds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from psclient.data.tracker import Piece
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
    """An answer.

    Attributes:
        pieces: what this worker is to train, in order; nothing where nothing is left to hand out.
        lost: of what it said that it holds: what it no longer does.
        epoch: the newest that has begun.
        elsewhere: unfinished samples of the epochs asked for that others hold.
        retry_seconds: when to ask again, where nothing was granted.
    """

    pieces: list[Piece]
    lost: dict[int, Ranges]
    epoch: int
    elsewhere: int
    retry_seconds: float


class SampleLease:
    """Asks for samples of one dataset.

    Args:
        cluster: the servers.
        dataset: its name.
        size: its samples.
        seed: of the order.
        shuffle: whether there is another order than the dataset's own.

    Attributes:
        dataset: its name.
        size: its samples.
    """

    def __init__(self, cluster: Cluster, dataset: str, size: int, seed: int, shuffle: bool) -> None:
        """Prepare; nothing is asked yet."""
        self.dataset, self.size = dataset, size
        self._cluster, self._membership = cluster, cluster.membership
        self._seed, self._shuffle = seed, shuffle
        self._joins = self._membership.joins

    @property
    def in_question(self) -> bool:
        """True where the worker has joined again since the last answer: what it held may be others' now."""
        return self._joins != self._membership.joins

    def ask(self, epoch: int | None, samples: int, held: Mapping[int, Ranges]) -> Granted:
        """Ask for samples.

        Args:
            epoch: the newest that is wanted; ``None`` for the newest that has begun.
            samples: at most so many; 0 to hear only what is lost.
            held: everything that this worker holds.

        Raises:
            SettingsMismatchError: other workers of the run have another dataset under this name.
            ServerUnreachableError: no answer within the patience; nothing is lost.
            ServerFaultError: the answer makes no sense.
        """
        for _ in range(_MOST_REJOINS):
            joins = self._membership.joins
            answer = self._call(epoch, samples, held)
            if isinstance(answer, pb.LeaseSamplesResponse):
                self._joins = joins
                self._membership.run_finished |= answer.run_state == pb.RUN_STATE_FINISHED
                lost: dict[int, Ranges] = {}
                for piece in self._pieces(answer.lost):
                    lost[piece.epoch] = lost.get(piece.epoch, Ranges()) | Ranges([(piece.start, piece.end)])
                return Granted(
                    self._pieces(answer.granted), lost, answer.epoch, answer.samples_elsewhere, answer.retry_seconds
                )
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
        return coordinator.connection.call(
            self._membership.policy(coordinator),
            lambda seconds: coordinator.connection.stub.LeaseSamples.future(request, timeout=seconds),
            lambda call: call.result(),
        )

    def _pieces(self, messages: Iterable[pb.SampleRange]) -> list[Piece]:
        pieces = [Piece(each.epoch, each.start, each.start + each.count) for each in messages]
        if any(piece.start >= piece.end or piece.end > self.size for piece in pieces):
            raise ServerFaultError(
                f"{self._membership.coordinator.address} speaks of samples that {self.dataset!r} does not have"
            )
        return pieces
