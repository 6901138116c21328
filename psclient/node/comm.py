"""Messages and tensors between the processes of a node.

Messages travel over a gloo group of their own, with a time limit of its own: a follower waits there for as long as its
leader waits for a server, which is too long for the group that averages gradients. Tensors on GPUs travel in the
latter, those on the host as messages do.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from psclient import errors
from psclient.errors import NodeBrokenError, SparsepsError
from psclient.optim.base import ParameterServerOptimizer
from psclient.report import StepReport, Totals

_COPIED = ("version", "finished", "live_workers", "worker", "run_id", "server", "report", "defaults")
_SMALL_BYTES = 1 << 16  # below it tensors travel together: a message for each bias would cost more than copying it
_SMALL_TOGETHER = 16  # at most so many of them in one message


@dataclass(frozen=True)
class RemoteError:
    """An error as it travels: the name of its class, its text, and those of its attributes that are plain values."""

    kind: str
    message: str
    attributes: dict[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> "RemoteError":
        """Describe an error."""
        plain = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float | tuple)}
        return cls(type(error).__name__, str(error), plain)

    def rebuild(self) -> SparsepsError:
        """Return an error of the same class; :class:`NodeBrokenError` for one that is not this library's."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, SparsepsError)):
            return NodeBrokenError(f"the process that speaks to the server ended with {self.kind}: {self.message}")
        error: SparsepsError = kind.__new__(kind, self.message)  # each class has a constructor of its own
        error.args = (self.message,)
        lists = {name: tuple(value) for name, value in self.attributes.items() if isinstance(value, list)}  # JSON's
        vars(error).update(self.attributes | lists)
        return error


@dataclass(frozen=True)
class NodeStatus:
    """State that every process of a node has: attributes of the leader's optimizer, sent after each call.

    Attributes:
        changed: the numbers of the tensors that the call has changed.
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
    error: RemoteError | None = None

    @classmethod
    def of(cls, leader: ParameterServerOptimizer | None, changed: list[int], error: Exception | None) -> "NodeStatus":
        """Describe the leader's optimizer after a call; without one, the call's outcome alone."""
        told = None if error is None else RemoteError.of(error)
        if leader is None:
            return cls(changed=changed, error=told)
        copied = {name: getattr(leader, name) for name in _COPIED}
        unfinished, totals = leader._unfinished, replace(leader.totals)
        return cls(**copied, unfinished=unfinished, totals=totals, changed=changed, error=told)

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


class NodeComm:
    """Connects one process to the others of its node; made by all of them; rank 0 of the group is the leader."""

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.is_leader = self.rank == 0
        self._seconds = timeout_seconds
        self._group = group
        self._closed = False
        with self._guarded("meet the others"):
            # Not dist.new_group(): a second group of the same ranks would have the name of the first one, and would
            # read its addresses in the store.
            store: Any = group.get_group_store()
            place = dist.PrefixStore(f"psclient/{store.add(f'psclient/{self.rank}', 1)}", store)  # type: ignore[attr-defined]
            self._messages: Any = dist.ProcessGroupGloo(place, self.rank, self.size, timedelta(seconds=timeout_seconds))

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return every process's values, in the order of ranks."""
        mine = torch.tensor(values, dtype=torch.int64, device="cpu")
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with self._guarded("begin a step"):
            self._messages.allgather([found], [mine]).wait()
        return [tensor.tolist() for tensor in found]

    def broadcast_bytes(self, data: bytes = b"") -> bytes:
        """Return the leader's data on every process."""
        with self._guarded("end a step"):
            length = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
            self._messages.broadcast(length, 0).wait()
            buffer = torch.empty(int(length), dtype=torch.uint8, device="cpu")
            if self.is_leader:
                buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._messages.broadcast(buffer, 0).wait()
        return buffer.numpy().tobytes()

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

    def close(self) -> None:
        """End the connections; processes that wait for this one then get an error at once."""
        self._closed = True
        self._messages = None

    @contextmanager
    def _guarded(self, doing: str) -> Iterator[None]:
        """Turn the failure of another process into an error that says so, and let the others know."""
        if self._closed:
            raise NodeBrokenError("the processes of this node have parted after an earlier error")
        try:
            yield
        except RuntimeError as error:  # the common base of what gloo, NCCL and their store raise
            self.close()
            raise NodeBrokenError(
                f"rank {self.rank} of {self.size} on this node wanted to {doing}, and another process of the "
                f"node is gone or has said nothing for {self._seconds:.0f} s ({str(error).splitlines()[0]})"
            ) from error
