"""What the processes of a node do together: one of them does it, and all know and hold the same afterwards."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import IntEnum

import torch

from psclient.errors import ConfigurationError, ModelChangedError, NodeBrokenError, SparsepsError
from psclient.model.module import TrainedModel
from psclient.model.replica import Replica
from psclient.node.comm import NodeLink
from psclient.node.status import NodeStatus, RemoteError
from psclient.optim.base import ParameterServerOptimizer


class Call(IntEnum):
    """A call that all processes of a node make; ``NOTHING`` where one of them cannot."""

    NOTHING = 0
    JOIN = 1
    STEP = 2
    FLUSH = 3
    PULL = 4


class LeaderCalls:
    """One process's part in them.

    Args:
        link: the way to the other processes.
        model: what is trained.

    Attributes:
        status: where the run is, as of the last call.
        leader: the optimizer that has joined; ``None`` on the other processes, and before a join.
    """

    def __init__(self, link: NodeLink, model: TrainedModel) -> None:
        """Nothing has been joined yet."""
        self.status = NodeStatus()
        self.leader: ParameterServerOptimizer | None = None
        self._link, self._model = link, model
        self._replica = Replica(model.layout, model.parameters)

    @property
    def leads(self) -> bool:
        """Whether this process speaks to the server."""
        return self._link.leads

    def call(self, call: Call, value: int, work: Callable[[int], None]) -> None:
        """Make a call together.

        Args:
            call: which.
            value: for a join, what must be the same on all; for a step, what is summed over all.
            work: does it, given the sum; called on the leader only.

        Raises:
            SparsepsError: what the leader has met, on every process.
            ConfigurationError: the processes make different calls, or have different models.
            NodeBrokenError: one of them is gone, silent, or cannot take part.
        """
        unfit: SparsepsError | None = None
        is_loaded = False
        try:
            is_loaded = self._is_loaded(call)
        except ModelChangedError as changed_model:
            unfit = changed_model
        found = self._link.gather([Call.NOTHING if unfit else call, value, is_loaded])
        if unfit is not None:
            raise unfit
        self._check_all_do(call, found)
        error: Exception | None
        if self._link.leads:
            error = self._lead(lambda: work(sum(number for _, number, _ in found)))
        else:
            self.status = NodeStatus.decode(self._link.hear())
            error = self.status.error.again() if self.status.error is not None else None
        # A process may hold anything before it has joined, and where its script has loaded a model.
        everything = error is None and (call in (Call.JOIN, Call.PULL) or any(loaded for _, _, loaded in found))
        changed = self.status.changed
        self._link.spread([t for i, t in enumerate(self._tensors()) if everything or changed >> i & 1])
        if error is not None:
            raise error
        self._replica.accept()

    def close(self) -> None:
        """Part from the other processes."""
        self._link.close()

    def _is_loaded(self, call: Call) -> bool:
        """Tell whether the script has written to this process's model since the last call.

        Raises:
            ModelChangedError: the model is another one than it was; the leader's optimizer looks at its own itself.
        """
        if call is Call.JOIN:
            return False
        try:
            self._model.buffers.now()
            if not self._link.leads:
                self._model.check()
            return self._replica.loaded() is not None
        except ModelChangedError:
            if self._link.leads:
                return False
            raise

    def _check_all_do(self, call: Call, found: Sequence[Sequence[int]]) -> None:
        for rank, (other, value, _) in enumerate(found):
            if other == Call.NOTHING:
                raise NodeBrokenError(f"rank {rank} of this node cannot take part in {call.name.lower()}()")
            if other != call:
                raise ConfigurationError(
                    f"rank {rank} of this node is in {Call(other).name.lower()}() while rank {self._link.rank} is in "
                    f"{call.name.lower()}(); all processes of a node must make the same calls in the same order"
                )
            if call is Call.JOIN and value != found[0][1]:
                raise ConfigurationError(
                    f"the model of rank {rank} differs from that of rank 0 of this node in names, shapes or dtypes; "
                    "build the same one on every process"
                )

    def _lead(self, work: Callable[[], None]) -> Exception | None:
        """Do the work and tell the others what became of it; return what it has met."""
        tensors = self._tensors()
        before = _stamps(tensors)
        error: Exception | None = None
        try:
            work()
        except Exception as met:
            error = met
        except BaseException:
            self._link.close()  # on the way out (SIGTERM, Ctrl-C): whoever waits must know
            raise
        changed = sum(1 << i for i, now in enumerate(_stamps(tensors)) if now != before[i])
        status = NodeStatus.of(self.leader) if self.leader is not None else NodeStatus()
        self.status = replace(status, changed=changed, error=None if error is None else RemoteError.of(error))
        self._link.tell(self.status.encode())
        return error

    def _tensors(self) -> list[torch.Tensor]:
        """Return what may change, in an order that all processes share."""
        return [*self._model.parameters, *self._model.buffers.now()]


def _stamps(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a number for each tensor that is another one after it was written to."""
    return [tensor._version for tensor in tensors]
