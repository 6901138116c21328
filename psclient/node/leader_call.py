"""Calls that all processes of a node make: the leader does the work, and all know and hold the same afterwards."""

from collections.abc import Callable, Sequence
from enum import IntEnum

import torch

from psclient.errors import ConfigurationError, ModelChangedError, NodeBrokenError, SparsepsError
from psclient.model.module import TrainedModel
from psclient.model.replica import Replica
from psclient.node.comm import NodeComm
from psclient.node.status import NodeStatus
from psclient.optim.base import ParameterServerOptimizer


class Call(IntEnum):
    """A call that all processes of a node make; ``NOTHING`` where one of them cannot."""

    NOTHING = 0
    JOIN = 1
    STEP = 2
    FLUSH = 3
    PULL = 4


class LeaderCalls:
    """One process's part in the calls of its node.

    Attributes:
        status: where the run is, as of the last call.
        leader: the optimizer that has joined; ``None`` on the other processes, and before a join.
    """

    def __init__(self, comm: NodeComm, model: TrainedModel) -> None:
        self.comm = comm
        self.status = NodeStatus()
        self.leader: ParameterServerOptimizer | None = None
        self._model = model
        self._replica = Replica(model.layout, model.parameters)

    def call(self, call: Call, value: int, work: Callable[[int], None]) -> None:
        """Make a call together; every process raises the error that the leader has met.

        Args:
            call: which.
            value: for a join, what must be the same on all; for a step, what is summed over all.
            work: does it, given the sum; called on the leader only.

        Raises:
            ConfigurationError: the processes make different calls, or have different models.
            NodeBrokenError: one of them is gone, silent, or cannot take part.
        """
        unfit: SparsepsError | None = None
        is_loaded = False
        try:
            is_loaded = call is not Call.JOIN and self._is_loaded()
        except ModelChangedError as error:
            if not self.comm.is_leader:  # whose optimizer checks its model by itself
                unfit = error
        found = self.comm.gather([Call.NOTHING if unfit else call, value, is_loaded])
        if unfit is not None:
            raise unfit
        self._check_all_do(call, found)
        met: Exception | None = None
        if self.comm.is_leader:
            met = self._lead(lambda: work(sum(number for _, number, _ in found)))
        else:
            self.status = NodeStatus.decode(self.comm.broadcast_bytes())
            met = None if self.status.error is None else self.status.error.rebuild()
        # A process may hold anything before it has joined, and where its script has loaded a model.
        everything = met is None and (call in (Call.JOIN, Call.PULL) or any(loaded for _, _, loaded in found))
        changed = self.status.changed
        self.comm.broadcast_tensors([t for i, t in enumerate(self._tensors()) if everything or changed >> i & 1])
        if met is not None:
            raise met
        self._replica.accept()

    def _is_loaded(self) -> bool:
        """Tell whether the script has written to this process's model since the last call."""
        self._model.buffers.now()
        if not self.comm.is_leader:
            self._model.check()
        return self._replica.loaded() is not None

    def _check_all_do(self, call: Call, found: Sequence[Sequence[int]]) -> None:
        for rank, (other, value, _) in enumerate(found):
            if other == Call.NOTHING:
                raise NodeBrokenError(f"rank {rank} of this node cannot take part in {call.name.lower()}()")
            if other != call:
                raise ConfigurationError(
                    f"rank {rank} of this node is in {Call(other).name.lower()}() while rank {self.comm.rank} is in "
                    f"{call.name.lower()}(); all processes of a node must make the same calls in the same order"
                )
            if call is Call.JOIN and value != found[0][1]:
                raise ConfigurationError(
                    f"the model of rank {rank} differs from that of rank 0 of this node in names, shapes or dtypes; "
                    "build the same one on every process"
                )

    def _lead(self, work: Callable[[], None]) -> Exception | None:
        tensors = self._tensors()
        before = [tensor._version for tensor in tensors]
        error: Exception | None = None
        try:
            work()
        except Exception as met:
            error = met
        except BaseException:
            self.comm.close()  # on the way out (SIGTERM, Ctrl-C): the others must know
            raise
        changed = sum(1 << i for i, tensor in enumerate(tensors) if tensor._version != before[i])
        self.status = NodeStatus.of(self.leader, changed, error)
        self.comm.broadcast_bytes(self.status.encode())
        return error

    def _tensors(self) -> list[torch.Tensor]:
        """Return what may change, in an order that all processes share."""
        return [*self._model.parameters, *self._model.buffers.now()]
