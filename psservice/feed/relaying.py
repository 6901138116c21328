"""How far the shards of a relay are: what each has of the source's cuts, as shard 0 knows it."""

import threading
from collections.abc import Collection

from pscore.reader.cut import Cut


class Relaying:
    """The cut that every shard is to stage, and what the shards have. Read and written by any thread.

    Attributes:
        target: the cut; on shard 0 the source's newest, on the others what shard 0 has told; ``None`` before.
        aimed: set when there is another target.
        failed: the name of the cut that this shard has tried to fetch last, and could not; empty if it could.
    """

    def __init__(self, num_shards: int) -> None:
        self._others = range(1, num_shards)
        self._has: dict[int, frozenset[str]] = {}  # by the shard's index: names of cuts
        self._failed: dict[int, str] = {}
        self.target: Cut | None = None
        self.aimed = threading.Event()
        self.failed = ""

    def aim(self, cut: Cut) -> None:
        """Name the cut that every shard is to stage; on shard 0, what shards could not fetch is forgotten."""
        self._failed.clear()
        if cut != self.target:
            self.target = cut
            self.aimed.set()

    def hear(self, index: int, has: Collection[str], failed: str) -> None:
        """Note which cuts another shard has, published or staged, and which one it could not fetch; on shard 0."""
        if index in self._others:
            self._has[index], self._failed[index] = frozenset(has), failed

    def others_have(self, name: str) -> bool:
        """Tell whether every other shard has a cut, published or staged; on shard 0."""
        return all(name in self._has.get(index, ()) for index in self._others)

    def some_failed(self, name: str) -> bool:
        """Tell whether another shard could not fetch a cut; on shard 0."""
        return any(self._failed.get(index) == name for index in self._others)
