"""Messages and tensors between the processes of a node.

Messages travel over a gloo group of their own, with a time limit of its own: a follower waits there for as long as its
leader waits for a server, which the group that averages gradients should not have to allow. Tensors travel in the
latter, which can carry them on whatever device they are.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from psclient.errors import NodeBrokenError

_SMALL_BYTES = 1 << 16  # below it tensors travel together: a message for each bias would cost more than copying it
_BUCKET_BYTES = 1 << 20  # at most so much of them in one message


class NodeComm:
    """One process's way to the others of its node, made by all of them; rank 0 of the group is the leader."""

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
        mine = torch.tensor(values, dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with self._guarded("begin a step"):
            self._messages.allgather([found], [mine]).wait()
        return [tensor.tolist() for tensor in found]

    def broadcast_bytes(self, data: bytes = b"") -> bytes:
        """Return the leader's data on every process."""
        with self._guarded("end a step"):
            length = torch.tensor([len(data)])
            self._messages.broadcast(length, 0).wait()
            buffer = torch.empty(int(length), dtype=torch.uint8)
            if self.is_leader:
                buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._messages.broadcast(buffer, 0).wait()
        return buffer.numpy().tobytes()

    @torch.no_grad()
    def broadcast_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write the leader's tensors over everybody's; all have the same ones, in the same order."""
        under_way = []
        with self._guarded("pass the parameters on"):
            for bucket in _buckets(tensors):
                in_place = len(bucket) == 1 and bucket[0].is_contiguous()
                flat = _bytes(bucket[0]) if in_place else torch.cat([_bytes(tensor) for tensor in bucket])
                work: Any = dist.broadcast(flat, group=self._group, async_op=True, group_src=0)
                under_way.append((work, flat, [] if in_place or self.is_leader else bucket))
            for work, flat, copied in under_way:
                work.wait()
                start = 0
                for tensor in copied:
                    part = flat[start : start + tensor.nbytes].clone()  # which may be unaligned
                    tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
                    start += tensor.nbytes

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


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors that travel in one message: large ones alone, small ones of one device together."""
    small: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.nbytes >= _SMALL_BYTES:
            yield [tensor]
        elif tensor.numel():
            total = tensor.nbytes + sum(other.nbytes for other in small)
            if small and (small[0].device != tensor.device or total > _BUCKET_BYTES):
                yield small
                small = []
            small.append(tensor)
    if small:
        yield small


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory, copied if not contiguous: bytes travel by every backend, and stay the same bits."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
