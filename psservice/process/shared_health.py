"""Whether all shards of one command serve, in memory that their processes share."""

import mmap

_STARTED, _SERVES, _BROKEN, _COUNTS_ALL, _HAS_MODEL = 1, 2, 4, 8, 16


class SharedHealth:
    """A byte for each shard in shared memory, and one more. Each process writes that of its own shard and reads all.

    The last tells standbys that one of them is to serve: the others serve then too.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._states = mmap.mmap(-1, shards + 1)

    def promote(self) -> None:
        """Have the standbys of all shards serve."""
        self._states[self._shards] = 1

    @property
    def is_promoted(self) -> bool:
        """Whether the standbys are to serve."""
        return bool(self._states[self._shards])

    def note_has_model(self, shard: int) -> None:
        """Note that this shard's standby has a model that it could serve."""
        self._states[shard] |= _HAS_MODEL

    @property
    def all_have_models(self) -> bool:
        """Whether every shard's standby has one: they serve together, or the model would lack a part."""
        return all(state & _HAS_MODEL for state in self._states[: self._shards])

    def note(self, shard: int, *, has_started: bool, serves: bool, is_broken: bool) -> None:
        """Note whether a shard's server has started, serves, and asks for a restart; all false without a process."""
        self._states[shard] = _STARTED * has_started | _SERVES * serves | _BROKEN * is_broken

    def note_counts_all(self, shard: int) -> None:
        """Note that this shard has seen all shards start: its answer covers all of them from now on."""
        self._states[shard] |= _COUNTS_ALL

    def has_started(self, shard: int) -> bool:
        """Whether a shard's server has started."""
        return bool(self._states[shard] & _STARTED)

    @property
    def all_have_started(self) -> bool:
        """Whether every shard's server has."""
        return all(state & _STARTED for state in self._states[: self._shards])

    @property
    def all_count_all(self) -> bool:
        """Whether every shard's health counts all shards."""
        return all(state & _COUNTS_ALL for state in self._states[: self._shards])

    @property
    def all_serve(self) -> bool:
        """Whether every shard accepts pushes and can make them durable as promised."""
        return all(state & _SERVES for state in self._states[: self._shards])

    @property
    def is_broken(self) -> bool:
        """Whether a shard's journal is damaged beyond repair by a running server."""
        return any(state & _BROKEN for state in self._states[: self._shards])
