"""What a run's method asks of the server: which update rule, and whether updates are gathered in rounds."""

from collections.abc import Mapping
from dataclasses import dataclass

from psservice.rules.rounds import RoundSettings
from psservice.rules.update import rule_maker
from psservice.rules.update.base import RuleMaker
from psservice.rules.update.subtract import Subtract


@dataclass(frozen=True, slots=True)
class Regime:
    """How the updates of a run are taken.

    Attributes:
        rule: makes what is done with an update.
        rounds: when a synchronous round closes; ``None`` for asynchronous training.
    """

    rule: RuleMaker = Subtract
    rounds: RoundSettings | None = None

    @classmethod
    def of(cls, method_settings: Mapping[str, str]) -> "Regime":
        """Read the settings in which workers agree; raises :class:`~pscore.reasons.Refusal` (``BAD_REQUEST``)."""
        return cls(rule_maker(method_settings), RoundSettings.parse(method_settings))
