"""What a run's method asks of the server: an update rule, synchronous rounds, group averaging."""

from collections.abc import Mapping
from dataclasses import dataclass

from pscore.wire.errors import ErrorCode, Rejected
from psservice.model.rounds import RoundSettings
from psservice.model.update import rule_maker
from psservice.model.update.base import RuleMaker
from psservice.model.update.subtract import Subtract
from psservice.model.wagma.schedule import GroupSettings


@dataclass(frozen=True, slots=True)
class TrainingMode:
    """How the updates of a run are applied; without rounds and groups, one by one to one model."""

    rule: RuleMaker = Subtract
    rounds: RoundSettings | None = None
    groups: GroupSettings | None = None

    @classmethod
    def of(cls, method_settings: Mapping[str, str]) -> "TrainingMode":
        """Read the settings in which workers agree; raises :class:`~pscore.wire.errors.Rejected` (``BAD_REQUEST``)."""
        rounds, groups = RoundSettings.parse(method_settings), GroupSettings.parse(method_settings)
        if rounds is not None and groups is not None:
            raise Rejected(ErrorCode.BAD_REQUEST, "models are averaged in groups or updates in rounds, not both")
        return cls(rule_maker(method_settings), rounds, groups)
