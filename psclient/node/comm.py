"""The state and the tensors of a node, which its processes tell one another.

Tensors on GPUs travel in the group that averages gradients, those on the host as messages do.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from psclient.errors import NodeBrokenError, SparsepsError
from psclient.optim.base import ParameterServerOptimizer
from psclient.ranks import Messages, RemoteError
from psclient.report import StepReport, Totals

_COPIED = ("version", "finished", "live_workers", "worker", "run_id", "server", "report", "defaults")
_SMALL_BYTES = 1 << 16  # below it tensors travel together: a message for each bias would cost more than copying it
_SMALL_TOGETHER = 16  # at most so many of them in one message


@dataclass(frozen=True)
class NodeStatus:
    """State that every process of a node has: attributes of the leader's optimizer, sent after each call.

    Attributes:
        changed: the numbers of the tensors that the call has changed.
        mark: of the leader's last push, as a state dict has it.
        in_doubt: whether a push has neither been acknowledged nor refused.
        is_stale: whether the state that the call loads is older than the last push, and is dropped.
        error: of the call; ``None`` after a success.
    """

    version: int = 0
    finished: bool = False
    unfinished: bool = False
    live_workers: int = 0
    worker: str = ""
    run_id: str = ""
    server: str = ""
    report: StepReport = field(default_factory=lambda: StepReport(0))
    totals: Totals = field(default_factory=Totals)
    defaults: dict[str, Any] = field(default_factory=dict)
    changed: list[int] = field(default_factory=list)
    mark: dict[str, Any] = field(default_factory=dict)
    in_doubt: bool = False
    is_stale: bool = False
    error: RemoteError | None = None

    @classmethod
    def of(cls, leader: ParameterServerOptimizer | None, changed: list[int], error: Exception | None) -> "NodeStatus":
        """Describe the leader's optimizer after a call; without one, the call's outcome alone."""
        told = None if error is None else RemoteError.of(error)
        if leader is None:
            return cls(changed=changed, error=told)
        copied = {name: getattr(leader, name) for name in _COPIED}
        state: dict[str, Any] = {
            "unfinished": leader._unfinished,
            "mark": asdict(leader._mark()),
            "in_doubt": leader._in_doubt,
        }
        return cls(**copied, **state, totals=replace(leader.totals), changed=changed, error=told)

    def encode(self) -> bytes:
        """Return JSON."""
        return json.dumps(asdict(self), default=float).encode()

    @classmethod
    def decode(cls, data: bytes) -> "NodeStatus":
        """Read what :meth:`encode` wrote."""
        plain = json.loads(data)
        plain["report"], plain["totals"] = StepReport(**plain["report"]), Totals(**plain["totals"])
        plain["error"] = plain["error"] and RemoteError(**plain["error"])
        return cls(**plain)


class NodeComm(Messages):
    """Connects one process to the others of its node; made by all of them; rank 0 of the group is the leader."""

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float) -> None:
        super().__init__(group, timeout_seconds)
        self._group = group

    @property
    def is_leader(self) -> bool:
        """Whether this process speaks to the server."""
        return self.rank == 0

    def _broken(self, why: str) -> SparsepsError:
        return NodeBrokenError(f"on this node, {why}")

    @torch.no_grad()
    def broadcast_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write the leader's tensors over everybody's; all have the same ones, in the same order.

        They travel as bytes, which every backend can send and which stay the same bits. Their versions stay, too: a
        change would be a loaded model to the leader's optimizer.
        """
        memories = [tensor.data.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        with self._guarded("pass the parameters on"):
            under_way = [self._broadcast(memory) for memory in memories if memory.numel() >= _SMALL_BYTES]
            for on_host in (True, False):
                small = [each for each in memories if 0 < each.numel() < _SMALL_BYTES and each.is_cpu == on_host]
                for start in range(0, len(small), _SMALL_TOGETHER):
                    bucket = small[start : start + _SMALL_TOGETHER]
                    joined = torch.cat([memory.to(bucket[0].device) for memory in bucket])
                    self._broadcast(joined).wait()
                    parts = torch.split(joined, [memory.numel() for memory in bucket])
                    for memory, part in zip(bucket, parts, strict=True):
                        memory.copy_(part)
            for work in under_way:
                work.wait()
        if not self.is_leader:
            for tensor, memory in zip(tensors, memories, strict=True):
                if not tensor.is_contiguous():
                    tensor.copy_(memory.view(tensor.dtype).view(tensor.shape))

    def _broadcast(self, memory: torch.Tensor) -> Any:
        """Begin to write the leader's bytes over everybody's; those on the host by gloo, because NCCL cannot."""
        if memory.is_cpu:
            return self._messages.broadcast(memory, 0)
        return dist.broadcast(memory, group=self._group, async_op=True, group_src=0)
