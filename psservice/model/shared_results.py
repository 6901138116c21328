"""Results that several callers share until the model changes: made once."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, cast

from psservice.memory_budget import Occupies

_MOST_RESULTS = 4


class Shareable(Protocol):
    """A result.

    Attributes:
        position: changes that the log had recorded when the result was made.
        failed: whether the result is of no use any more.
        nbytes: upper bound of the bytes that the result occupies.
        messages: what calls send of the result, which occupies the memory.
    """

    @property
    def position(self) -> int: ...  # noqa: D102

    @property
    def failed(self) -> bool: ...  # noqa: D102

    @property
    def nbytes(self) -> int: ...  # noqa: D102

    @property
    def messages(self) -> Occupies: ...  # noqa: D102


Made = TypeVar("Made", bound=Shareable)


@dataclass(slots=True)
class _Slot:
    lock: threading.Lock = field(default_factory=threading.Lock)
    result: Shareable | None = None


class SharedResults:
    """The last few results, until the next version: together ``most_bytes``. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._slots: OrderedDict[Hashable, _Slot] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, position: int, make: Callable[[], Made]) -> Made:
        """Return the result for a key, with every change before ``position``; of several callers one makes it."""
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
            self._slots.move_to_end(key)
        with slot.lock:
            if slot.result is None or slot.result.position < position or slot.result.failed:
                slot.result = make()
                self._make_room()
            return cast("Made", slot.result)

    def occupied(self) -> dict[int, int]:
        """Return the bytes of each result's messages, by their ``id``; whoever has that keeps none of them alive."""
        with self._lock:
            kept = [slot.result.messages for slot in self._slots.values() if slot.result is not None]
            return {id(each): each.nbytes for each in kept}

    def clear(self) -> None:
        """Drop all results: the model has changed, or there is no room for them."""
        with self._lock:
            self._slots.clear()

    def _make_room(self) -> None:
        with self._lock:
            nbytes = sum(slot.result.nbytes for slot in self._slots.values() if slot.result is not None)
            while self._slots and (nbytes > self._most_bytes or len(self._slots) > _MOST_RESULTS):
                _, dropped = self._slots.popitem(last=False)
                nbytes -= 0 if dropped.result is None else dropped.result.nbytes
