"""The bytes that a worker may use, in place of a density."""

import math
from dataclasses import dataclass

from psclient.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes each way, from which density, value type and form of the replies follow.

    One of ``share``, ``bytes_per_second`` and ``seconds_per_step`` is given. A number as ``budget=`` is the share. What
    depends on the line or on the time of a step is measured, and followed as it changes; before the first measurement
    the share is 3 %.

    Attributes:
        share: of the bytes of a dense fp32 push, 0 to 1.
        reply_share: beside ``share``, that of a reply, if it is another one: a reply has what all workers have pushed,
            and many lines carry more down than up.
        bytes_per_second: of the line, each way.
        seconds_per_step: that the line may be busy with a push, and with a reply.

    Raises:
        ConfigurationError: none or several are given, ``reply_share`` without ``share``, or one is out of its range.
    """

    share: float | None = None
    reply_share: float | None = None
    bytes_per_second: float | None = None
    seconds_per_step: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}
        if len(given.keys() - {"reply_share"}) != 1 or (self.reply_share is not None and self.share is None):
            raise ConfigurationError(
                "a Budget has one of share=, bytes_per_second= and seconds_per_step=; reply_share= goes with share="
            )
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigurationError(f"{name} of a budget must be an int or a float above 0, not {value!r}")
            if name.endswith("share") and value > 1:
                raise ConfigurationError(
                    f"{name} of a budget must be at most 1, all bytes of a dense push, not {value!r}; bytes are "
                    "psclient.Budget(bytes_per_second=…)"
                )


DEFAULT_BUDGET = Budget(share=0.03)
"""That of a sparse method to which nothing of its form is given (docs/guide/which-method.md has the figures)."""


def budget_of(given: object) -> Budget:
    """Return what ``budget=`` means; :class:`ConfigurationError` for another thing."""
    if isinstance(given, Budget):
        return given
    if isinstance(given, int | float) and not isinstance(given, bool):
        return Budget(share=given)
    raise ConfigurationError(
        f"budget= must be a share of the dense bytes, as 0.03, or psclient.Budget(…), not {given!r}"
    )
