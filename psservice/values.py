"""Values that several rooms exchange."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Identity(NamedTuple):
    """A worker's name, and the UUID of one life of the process behind that name."""

    worker_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class PushAnswer:
    """The answer to a push; kept for repeats of that push."""

    version: int
    staleness: int
    apply_nanoseconds: int = field(compare=False)
