"""What a run's method asks of the server: which update rule, and whether updates are gathered in rounds."""

from collections.abc import Mapping
from dataclasses import dataclass

from pscore.reasons import Reason, Refusal
from psservice.rules.groups import GroupSettings
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
        groups: who averages with whom; ``None`` where workers share one model.
    """

    rule: RuleMaker = Subtract
    rounds: RoundSettings | None = None
    groups: GroupSettings | None = None

    @classmethod
    def of(cls, method_settings: Mapping[str, str]) -> "Regime":
        """Read the settings in which workers agree; raises :class:`~pscore.reasons.Refusal` (``BAD_REQUEST``)."""
        rounds, groups = RoundSettings.parse(method_settings), GroupSettings.parse(method_settings)
        if rounds is not None and groups is not None:
            raise Refusal(Reason.BAD_REQUEST, "models are averaged in groups or updates in rounds, not both")
        return cls(rule_maker(method_settings), rounds, groups)
