"""Synchronous rounds, as a worker asks for them."""

import json
import numbers
from dataclasses import asdict, dataclass

from psclient.errors import ConfigurationError
from psclient.whole_numbers import whole_number


@dataclass(frozen=True, slots=True)
class Rounds:
    """Train synchronously: each version of the model is the mean of one update from every live worker.

    Any method takes it as ``rounds=``. A worker that comes too late for a round keeps its update in its residual. Pulls
    wait for the round's end, each shard's by itself.

    Attributes:
        quorum: contributions that close a round (backup workers; Chen et al., 2016): the ``q`` fastest of ``W``;
            ``None`` waits for all live workers.
        seconds: after a round's first contribution, when it closes with those that are there; ``None`` for no limit.
        start_workers: how many live workers the first round of a run waits for, so that the first to come does not
            train alone until the others have joined; of a run that begins at version 0.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    quorum: int | None = None
    seconds: float | None = None
    start_workers: int = 1

    def __post_init__(self) -> None:
        if self.quorum is not None:
            quorum = whole_number(self.quorum, "quorum must be a number of contributions, or None for all", 1)
            object.__setattr__(self, "quorum", quorum)
        workers = whole_number(self.start_workers, "start_workers must be a number of workers", 1)
        object.__setattr__(self, "start_workers", workers)
        if self.seconds is None:
            return
        is_time = isinstance(self.seconds, numbers.Real) and not isinstance(self.seconds, bool)
        if not (is_time and 0 < self.seconds < float("inf")):
            raise ConfigurationError(f"seconds must be a finite number above 0, or None, not {self.seconds!r}")
        object.__setattr__(self, "seconds", float(self.seconds))

    def agreed(self) -> str:
        """Return it as the text in which workers must agree."""
        limits = {"quorum": self.quorum or 0, "seconds": self.seconds or 0.0}  # the protocol's words for none
        return json.dumps(asdict(self) | limits, sort_keys=True)
