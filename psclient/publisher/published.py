"""A version that a publisher has published."""

from typing import NamedTuple


class Published(NamedTuple):
    """A version of a feed that readers get.

    Attributes:
        version: its number.
        changed: words that differ from the version before; all of the first one, and if that is not known.
        nbytes: that were sent.
        seconds: that the publication took.
        weight_version: the name of its values, as followers have it (:attr:`Cut.weight_version`).
    """

    version: int
    changed: int
    nbytes: int
    seconds: float
    weight_version: str
