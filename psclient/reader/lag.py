"""How far a follower is behind."""

from typing import NamedTuple


class Lag(NamedTuple):
    """How far a follower is behind.

    Attributes:
        versions: of shard 0 that it lacks, as far as is known.
        seconds: since its model was last known to be the newest.
    """

    versions: int
    seconds: float
