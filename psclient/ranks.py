"""Messages between the ranks of a group of processes.

They travel over gloo connections of their own, with a time limit of its own: a process waits there for as long as
another one waits for a server, which is too long for the group that averages gradients.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from psclient import errors
from psclient.errors import NodeBrokenError, RankLostError, SparsepsError

_LARGEST = 1 << 28  # bytes of one message of gloo
_PIECE = 64 << 20  # bytes that all ranks get at a time
_MOST_OF = 0.9  # of the time limit: who has waited so long has met it, whatever the library beneath calls that


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

    def rebuild(self, unknown: type[SparsepsError] = NodeBrokenError) -> SparsepsError:
        """Return an error of the same class; an ``unknown`` one if that is not this library's."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, SparsepsError)):
            return unknown(f"the process that speaks to the server ended with {self.kind}: {self.message}")
        error: SparsepsError = kind.__new__(kind, self.message)  # each class has a constructor of its own
        error.args = (self.message,)
        lists = {name: tuple(value) for name, value in self.attributes.items() if isinstance(value, list)}  # JSON's
        vars(error).update(self.attributes | lists)
        return error


class Messages:
    """Connects one process to the others of a group; made by all of them.

    A process that is gone, or silent for ``timeout_seconds``, ends the connections: each waiting process then gets a
    :class:`RankLostError`, or what a subclass has for it.

    Attributes:
        rank: this process's, within the group; ``size``: of the group.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._seconds = timeout_seconds
        self._closed = False
        with self._guarded("meet the others, who have to be made with the same group"):
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
        """Return the first rank's data on every process."""
        with self._guarded("end a step"):
            length = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
            self._messages.broadcast(length, 0).wait()
            buffer = torch.empty(int(length), dtype=torch.uint8, device="cpu")
            if self.rank == 0:
                buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._messages.broadcast(buffer, 0).wait()
        return buffer.numpy().tobytes()

    def broadcast_tensors_of(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write the first rank's bytes over those of all; all have contiguous tensors of these sizes on the host."""
        with self._guarded("pass entries on"):
            for tensor in tensors:
                octets = tensor.view(-1).view(torch.uint8)
                for start in range(0, octets.numel(), _PIECE):
                    self._messages.broadcast(octets[start : start + _PIECE], 0).wait()

    def send(self, rank: int, data: bytes | NDArray[Any]) -> None:
        """Send bytes, or an array's, to one process."""
        octets = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.reshape(-1).view(np.uint8)
        with self._guarded("send to another one"):
            self._messages.send([torch.tensor([octets.size], dtype=torch.int64, device="cpu")], rank, 0).wait()
            for start in range(0, octets.size, _LARGEST):
                part = torch.from_numpy(octets[start : start + _LARGEST].copy())
                self._messages.send([part], rank, 0).wait()

    def receive(self, rank: int) -> NDArray[np.uint8]:
        """Return the bytes that one process sends."""
        with self._guarded("hear another one"):
            size = torch.zeros(1, dtype=torch.int64, device="cpu")
            self._messages.recv([size], rank, 0).wait()
            octets = torch.empty(int(size), dtype=torch.uint8, device="cpu")
            for start in range(0, int(size), _LARGEST):
                self._messages.recv([octets[start : start + _LARGEST]], rank, 0).wait()
        return octets.numpy()

    def close(self) -> None:
        """End the connections; processes that wait for this one then get an error at once."""
        self._closed = True
        self._messages = None

    @property
    def is_closed(self) -> bool:
        """Whether the connections have ended."""
        return self._closed

    def _broken(self, why: str) -> SparsepsError:
        """Return the error of a group that cannot go on."""
        return RankLostError(why)

    @contextmanager
    def _guarded(self, doing: str) -> Iterator[None]:
        """Turn the failure of another process into an error that says so, and let the others know."""
        if self._closed:
            raise self._broken("the processes have parted after an earlier error")
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:  # the common base of what gloo, NCCL and their store raise
            self.close()
            waited = time.monotonic() - began
            why = f"has said nothing for {waited:.0f} s" if waited >= _MOST_OF * self._seconds else "is gone"
            raise self._broken(
                f"rank {self.rank} of {self.size} wanted to {doing}, and another process {why} "
                f"({str(error).splitlines()[0]})"
            ) from error
