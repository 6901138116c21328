"""Synchronous rounds, as a worker asks for them."""

import json
from dataclasses import asdict, dataclass

from psclient.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Rounds:
    """Train synchronously: each version of the model is the mean of one update from every live worker.

    Any method takes it as ``rounds=``. A worker that comes too late for a round keeps its update in its residual. Pulls
    wait for the round's end, each shard's by itself.

    Attributes:
        quorum: contributions that close a round (backup workers; Chen et al., 2016): the ``q`` fastest of ``W``; 0
            waits for all live workers.
        seconds: after a round's first contribution, when it closes with those that are there; 0 for no such limit.
        start_workers: how many live workers the first round of a run waits for, so that the first to come does not
            train alone until the others have joined; of a run that begins at version 0.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    quorum: int = 0
    seconds: float = 0.0
    start_workers: int = 1

    def __post_init__(self) -> None:
        counts = isinstance(self.quorum, int) and isinstance(self.start_workers, int)
        times = isinstance(self.seconds, int | float) and 0 <= self.seconds < float("inf")
        if not (counts and times and self.quorum >= 0 and self.start_workers >= 1):
            raise ConfigurationError(
                f"{self}: quorum and seconds must be numbers of at least 0, start_workers of at least 1, and all finite"
            )

    def agreed(self) -> str:
        """Return it as the text in which workers must agree."""
        return json.dumps(asdict(self), sort_keys=True)
