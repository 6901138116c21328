"""How the processes of a node speak to one another: who takes part, what the leader says, tensors.

Words travel over a gloo group of their own, with a time limit of its own: a follower waits there for as long as its
leader waits for a server, which the group that averages gradients should not have to allow. Tensors travel in the
latter, which can carry them on whatever device they are.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from psclient.errors import NodeBrokenError

_SMALL_BYTES = 1 << 16
"""Tensors below this travel together: a message for each bias would cost more than copying it."""

_BUCKET_BYTES = 1 << 20
"""At most so much of them in one message."""


class NodeLink:
    """One process's way to the others of its node; rank 0 of the group leads.

    Args:
        group: the node's processes.
        timeout_seconds: how long any of them may let the others wait.

    Attributes:
        leads: whether this process does.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float) -> None:
        """Make the group for words; every process of the node does."""
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        self.leads = self.rank == 0
        self._seconds = timeout_seconds
        self._group: dist.ProcessGroup = group
        self._words: dist.ProcessGroup | None = None
        with self._whole("meet the others"):
            # Not torch's new_group(): a second one of the same ranks would look for the first one's addresses.
            store = group.get_group_store()
            place = PrefixStore(f"psclient/{store.add(f'psclient/{self.rank}', 1)}", store)
            words = ProcessGroupGloo(place, self.rank, len(self.ranks), timedelta(seconds=timeout_seconds))
            self._words = cast("dist.ProcessGroup", words)  # it has the same calls; torch's stubs leave them out

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return every process's values, in the order of ranks."""
        mine = torch.tensor(values, dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in self.ranks]
        words = self._open()
        with self._whole("begin a step"):
            words.allgather([found], [mine]).wait()
        return [tensor.tolist() for tensor in found]

    def tell(self, data: bytes) -> None:
        """Say something to all others; only the leader does."""
        words = self._open()
        with self._whole("end a step"):
            words.broadcast(torch.tensor([len(data)]), 0).wait()
            words.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0).wait()

    def hear(self) -> bytes:
        """Wait for what the leader says."""
        words = self._open()
        with self._whole("end a step"):
            length = torch.zeros(1, dtype=torch.int64)
            words.broadcast(length, 0).wait()
            data = torch.empty(int(length), dtype=torch.uint8)
            words.broadcast(data, 0).wait()
        return data.numpy().tobytes()

    @torch.no_grad()
    def spread(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write the leader's tensors over everybody's; all have the same ones, in the same order."""
        with self._whole("pass the parameters on"):
            under_way = [(bucket, *self._broadcast(bucket)) for bucket in _buckets(tensors)]
            for bucket, joined, work in under_way:
                work.wait()
                if joined is None or self.leads:
                    continue
                parts = torch.split(joined, [tensor.nbytes for tensor in bucket])
                for tensor, part in zip(bucket, parts, strict=True):
                    tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # a part may be unaligned

    def close(self) -> None:
        """End the connections; whoever waits for this process then knows at once."""
        self._words = None

    def _broadcast(self, bucket: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, dist.Work]:
        """Begin to send a bucket; return where it travels (``None``: in the tensor itself), and what to wait for."""
        in_place = len(bucket) == 1 and bucket[0].is_contiguous()
        flat = _bytes(bucket[0]) if in_place else torch.cat([_bytes(tensor.contiguous()) for tensor in bucket])
        work = dist.broadcast(flat, self.ranks[0], group=self._group, async_op=True)
        assert work is not None
        return None if in_place else flat, work

    def _open(self) -> dist.ProcessGroup:
        if self._words is None:
            raise NodeBrokenError("the processes of this node have parted after an earlier error")
        return self._words

    @contextmanager
    def _whole(self, doing: str) -> Iterator[None]:
        """Turn the failure of a process of the node into an error that says so, and let the others know."""
        try:
            yield
        except RuntimeError as error:  # the common base of what gloo, NCCL and their store raise
            self.close()
            raise NodeBrokenError(
                f"rank {self.rank} of {len(self.ranks)} on this node wanted to {doing}, and another process of the "
                f"node is gone or has said nothing for {self._seconds:.0f} s ({str(error).splitlines()[0]})"
            ) from error


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors that travel in one message: large ones alone, small ones of one device together."""
    small: list[torch.Tensor] = []
    for tensor in tensors:
        if not tensor.numel():
            continue
        if tensor.nbytes >= _SMALL_BYTES:
            yield [tensor]
            continue
        if small and (
            small[0].device != tensor.device or sum(other.nbytes for other in small) + tensor.nbytes > _BUCKET_BYTES
        ):
            yield small
            small = []
        small.append(tensor)
    if small:
        yield small


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory: bytes can be sent by every backend, and come out as the same bits."""
    return tensor.detach().view(-1).view(torch.uint8)
