"""What a run's method asks of the server: an update rule, synchronous rounds, group averaging.

Workers name the rule in the settings in which all must agree (``update``; left out, ``subtract``), and never send code.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from pscore.wire.errors import ErrorCode, Rejected
from psservice.model.synchronous_rounds import RoundSettings
from psservice.model.wagma.schedule import GroupSettings
from psservice.rules.base import RuleMaker
from psservice.rules.delayed_nesterov import DelayedNesterov, Options
from psservice.rules.optimizer_settings import TorchSettings
from psservice.rules.rmsprop import RMSprop, settings_of
from psservice.rules.subtract import Subtract
from psservice.rules.torch_optimizer import TorchOptimizer

_RULES: dict[str, Callable[[Mapping[str, str]], RuleMaker]] = {
    "subtract": lambda settings: Subtract,
    "average": lambda settings: Subtract,  # from each worker's own model; see psservice.model.wagma.replicas
    "delayed_nesterov": lambda settings: partial(DelayedNesterov, Options.parse(settings)),
    "rmsprop": lambda settings: partial(RMSprop, settings_of(settings)),
    "torch": lambda settings: partial(TorchOptimizer, TorchSettings.parse(settings)),
}


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
        name = method_settings.get("update", "subtract")
        if name not in _RULES:
            raise Rejected(
                ErrorCode.BAD_REQUEST, f"this server has no update rule {name!r}; it has {', '.join(_RULES)}"
            )
        return cls(_RULES[name](method_settings), rounds, groups)

    @property
    def is_asynchronous(self) -> bool:
        """Whether pushes are applied to one model as they come, so that staleness has its usual meaning."""
        return self.rounds is None and self.groups is None
