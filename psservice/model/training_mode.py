"""What a run's method asks of the server: an update rule, synchronous rounds, group averaging.

Workers name the rule in the settings in which all must agree (``update``; left out, ``subtract``), and never send code.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import pydantic.dataclasses
from pydantic import Field, TypeAdapter, ValidationError

from pscore.wire.errors import ErrorCode, Rejected
from psservice.rules.adagrad import Adagrad
from psservice.rules.assign import Assign
from psservice.rules.base import RuleMaker
from psservice.rules.delayed_nesterov import DelayedNesterov, Options
from psservice.rules.optimizer_settings import TorchSettings
from psservice.rules.rmsprop import RMSprop
from psservice.rules.subtract import Subtract
from psservice.rules.torch_optimizer import TorchOptimizer

_MOST_WORKERS = 1 << 20

_RULES: dict[str, Callable[[Mapping[str, str]], RuleMaker]] = {
    "adagrad": lambda settings: partial(Adagrad, TorchSettings.parse(settings)),
    "subtract": lambda settings: Subtract,
    "assign": lambda settings: Assign,
    "average": lambda settings: Subtract,  # from each worker's own model; see psservice.wagma.replicas
    "delayed_nesterov": lambda settings: partial(DelayedNesterov, Options.parse(settings)),
    "relay": lambda settings: Assign,  # of a relay, which has no workers
    "rmsprop": lambda settings: partial(RMSprop, TorchSettings.parse(settings)),
    "torch": lambda settings: partial(TorchOptimizer, TorchSettings.parse(settings)),
}


@pydantic.dataclasses.dataclass(frozen=True, slots=True)
class RoundSettings:
    """When a round closes.

    Attributes:
        quorum: contributions that are enough; 0 for those of all live workers.
        seconds: after the first contribution, when the round closes with what is there; 0 for no such limit.
        start_workers: live workers that the first round of a run waits for.
        wait_factor: how many times as long as the median worker's a contribution may take for a round to wait for it;
            0 to wait for all. With it a late contribution is taken into the round that is open.
    """

    quorum: int = Field(ge=0, le=_MOST_WORKERS)
    seconds: float = Field(ge=0, allow_inf_nan=False)
    start_workers: int = Field(ge=1, le=_MOST_WORKERS)
    wait_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] | Annotated[float, Field(ge=0, le=0)] = 0

    @classmethod
    def parse(cls, settings: Mapping[str, str]) -> "RoundSettings | None":
        """Read ``rounds`` of the method settings; ``None``: asynchronous (``BAD_REQUEST``)."""
        text = settings.get("rounds", "")
        try:
            return TypeAdapter(cls).validate_json(text, strict=True) if text else None
        except ValidationError as error:
            raise Rejected(ErrorCode.BAD_REQUEST, f"the settings of rounds make no sense: {text}") from error


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """What the workers of a run agree on; ``size`` 0 is the power of two nearest ``√W`` (docs/guide/wagma.md)."""

    size: int = 0
    tau: int = 10
    late: str = "replace"

    @classmethod
    def parse(cls, settings: Mapping[str, str]) -> "GroupSettings | None":
        """Read the method settings (``BAD_REQUEST``); ``None`` if workers share one model."""
        if settings.get("update") != "average":
            return None
        try:
            read = cls(int(settings["group_size"]), int(settings["tau"]), settings["late"])
            if read.late not in ("paper", "replace"):
                raise ValueError(f"late must be 'paper' or 'replace', not {read.late!r}")
        except (KeyError, ValueError) as error:
            raise Rejected(ErrorCode.BAD_REQUEST, f"the settings of group averaging cannot be read: {error}") from error
        if read.size == 1 or not 0 <= read.size <= _MOST_WORKERS or not 0 <= read.tau <= _MOST_WORKERS:
            raise Rejected(ErrorCode.BAD_REQUEST, f"no groups of {read.size} with tau = {read.tau}")
        return read

    def is_global(self, iteration: int) -> bool:
        """Tell whether all live workers average, and wait for each other, at an iteration (counted from 0)."""
        return (iteration + 1) % (self.tau + 1) == 0


@dataclass(frozen=True, slots=True)
class TrainingMode:
    """How the updates of a run are applied; without rounds and groups, one by one to one model.

    Attributes:
        is_feed: whether nothing is trained, and updates are words that are published.
        is_relayed: whether nothing is trained or published here, and versions are those of another server.
    """

    rule: RuleMaker = Subtract
    rounds: RoundSettings | None = None
    groups: GroupSettings | None = None
    is_feed: bool = False
    is_relayed: bool = False

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
        is_feed = name == "assign"
        if is_feed and rounds is not None:
            raise Rejected(ErrorCode.BAD_REQUEST, "a feed has no rounds")
        return cls(_RULES[name](method_settings), rounds, groups, is_feed, name == "relay")

    @property
    def is_asynchronous(self) -> bool:
        """Whether pushes are applied to one model as they come, so that staleness has its usual meaning."""
        return self.rounds is None and self.groups is None and not (self.is_feed or self.is_relayed)
