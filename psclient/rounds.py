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
    wait for the round's end, each shard's by itself. If workers are not equally fast, ``wait_factor`` lets fast ones
    go on, and takes what the slow ones bring, whenever that is.

    Attributes:
        quorum: contributions that close a round (backup workers; Chen et al., 2016): the ``q`` fastest of ``W``;
            ``None`` waits for all live workers.
        seconds: after a round's first contribution, when it closes with those that are there; ``None`` for no limit.
        start_workers: how many live workers the first round of a run waits for, so that the first to come does not
            train alone until the others have joined; of a run that begins at version 0.
        wait_factor: a round waits for no worker that takes more than so many times as long as the median worker; 1.5,
            say. The server measures that from round to round. An update that comes late is then part of the round that
            is open, and not refused. ``None`` waits for every live worker, and refuses what is late.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    quorum: int | None = None
    seconds: float | None = None
    start_workers: int = 1
    wait_factor: float | None = None

    def __post_init__(self) -> None:
        if self.quorum is not None:
            quorum = whole_number(self.quorum, "quorum must be a number of contributions, or None for all", 1)
            object.__setattr__(self, "quorum", quorum)
        workers = whole_number(self.start_workers, "start_workers must be a number of workers", 1)
        object.__setattr__(self, "start_workers", workers)
        for name, least in (("seconds", 0), ("wait_factor", 1)):
            value = getattr(self, name)
            if value is None:
                continue
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not (is_number and least < float(value) < float("inf")):
                raise ConfigurationError(f"{name} must be a finite number above {least}, or None, not {value!r}")
            object.__setattr__(self, name, float(value))

    def agreed(self) -> str:
        """Return it as the text in which workers must agree."""
        limits = {"quorum": self.quorum or 0, "seconds": self.seconds or 0.0}  # the protocol's words for none
        agreed = asdict(self) | limits
        if self.wait_factor is None:
            del agreed["wait_factor"]
        return json.dumps(agreed, sort_keys=True)
