"""How far a follower is behind."""

from typing import NamedTuple


class Lag(NamedTuple):
    """How far a follower is behind.

    Attributes:
        versions: of shard 0 that it lacks, as far as is known; at a relay, of the source, as far as the relay knows.
        seconds: since its model was last known to be the newest that the server has. A relay may be behind its source
            by more (``psservice status``).
    """

    versions: int
    seconds: float
