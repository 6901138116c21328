"""Saving and restoring an optimizer's memories (residuals, momentum), and telling when they are out of date."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer


@dataclass(frozen=True, slots=True)
class PushMark:
    """Which push a saved state belongs to.

    Attributes:
        worker: name of the worker that saved it.
        incarnation: its life.
        acknowledged_step: the last push that it knew to be applied.
        step: its last step.
    """

    worker: str
    incarnation: str
    acknowledged_step: int
    step: int

    def plain(self) -> dict[str, Any]:
        """Return plain values for a state dict."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any] | None) -> "PushMark | None":
        """Read what :meth:`plain` wrote; ``None`` from a state of another optimizer."""
        return None if plain is None else cls(**plain)


def stale_residuals(mark: PushMark, known: tuple[str, int] | None) -> bool:
    """Tell whether residuals saved at ``mark`` were sent since.

    Args:
        mark: when they were saved.
        known: (incarnation, step) of the last push that the server has applied from this worker; ``None`` if it knows
            none.
    """
    return known is not None and known != (mark.incarnation, mark.acknowledged_step)


def restore_memories(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Put every saved tensor back in fp32: ``torch`` has cast it to its parameter's dtype, which may be narrower."""
    for saved_group, group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        for key, parameter in zip(saved_group["params"], group["params"], strict=True):
            for name, value in saved["state"].get(key, {}).items():
                if isinstance(value, torch.Tensor):
                    optimizer.state[parameter][name] = value.to(parameter.device, torch.float32, copy=True)
