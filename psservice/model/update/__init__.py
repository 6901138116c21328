"""Update rules: what the server does with a push, one file each.

A run's rule follows from its method: workers name it in the settings in which all must agree (``update``; left out, it
is ``subtract``), and never send code.
"""

from collections.abc import Callable, Mapping

from pscore.wire.errors import ErrorCode, Rejected
from psservice.model.update import torch_optimizer
from psservice.model.update.base import RuleMaker
from psservice.model.update.subtract import Subtract

_RULES: dict[str, Callable[[Mapping[str, str]], RuleMaker]] = {
    "subtract": lambda settings: Subtract,
    "average": lambda settings: Subtract,  # from each worker's own model; see psservice.model.wagma.replicas
    "torch": torch_optimizer.maker,
}


def rule_maker(settings: Mapping[str, str]) -> RuleMaker:
    """Return the maker of the rule that these method settings name; raises :class:`Rejected` (``BAD_REQUEST``)."""
    name = settings.get("update", "subtract")
    if name not in _RULES:
        raise Rejected(ErrorCode.BAD_REQUEST, f"this server has no update rule {name!r}; it has {', '.join(_RULES)}")
    return _RULES[name](settings)
