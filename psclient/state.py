"""Saving and restoring an optimizer's memories (residuals, momentum), and telling when they are out of date."""

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from psclient.errors import ConfigurationError
from psclient.exchange import Exchange
from psclient.hyperparameters import check_hyperparameters
from psclient.membership import Membership
from psclient.methods.base import State

_ADDED_BY_TORCH = frozenset({"differentiable"})
"""What torch adds to an optimizer's defaults when it loads a state; no group has it."""


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

    @classmethod
    def now(cls, membership: Membership, exchange: Exchange) -> "PushMark":
        """Return where a worker stands."""
        identity = membership.identity
        return cls(identity.worker_id, identity.incarnation, exchange.acknowledged_step, exchange.step)

    def plain(self) -> dict[str, Any]:
        """Return plain values for a state dict."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any] | None) -> "PushMark | None":
        """Read what :meth:`plain` wrote; ``None`` from a state of another optimizer."""
        return None if plain is None else cls(**plain)


def split(state_dict: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[PushMark | None, dict[str, Any]]:
    """Return the mark of a state dict, and the rest of it, which is torch's.

    Args:
        state_dict: what is to be loaded.
        defaults: the optimizer's hyper-parameters, of which each group must have its own.

    Raises:
        ConfigurationError: another optimizer wrote it, or a hyper-parameter is out of its range.
    """
    if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get("param_groups"), list):
        raise ConfigurationError("this is no state of an optimizer: load what optimizer.state_dict() has returned")
    plain = {name: value for name, value in state_dict.items() if name != "psclient"}
    for group in plain["param_groups"]:
        if lacking := sorted(defaults.keys() - group.keys() - _ADDED_BY_TORCH):
            raise ConfigurationError(f"this state is another optimizer's: it has no {', '.join(lacking)}")
        check_hyperparameters(group)
    return PushMark.from_plain(state_dict.get("psclient")), plain


def stale_residuals(mark: PushMark, now: PushMark, record: tuple[str, int] | None) -> bool:
    """Tell whether residuals saved at ``mark`` were sent since.

    Args:
        mark: when they were saved.
        now: where the worker stands.
        record: (incarnation, step) of the last push under this worker's name that the server had applied when the
            worker joined; ``None`` if it knew none.
    """
    if now.acknowledged_step or mark.incarnation == now.incarnation:
        record = now.incarnation, now.acknowledged_step
    return record is not None and record != (mark.incarnation, mark.acknowledged_step)


def taken_back(
    memories: MutableMapping[torch.Tensor, State], exchange: Exchange, state_dict: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return a state dict as if a push in doubt had been refused; the memories stay as they are."""
    if not exchange.in_doubt:
        return state_dict()
    kept = {parameter: copy.deepcopy(memory) for parameter, memory in memories.items()}
    exchange.give_back(exchange.held_parts())
    state = copy.deepcopy(state_dict())
    memories.update(kept)
    return state


def restore_memories(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Put every saved tensor back in fp32: ``torch`` has cast it to its parameter's dtype, which may be narrower."""
    for saved_group, group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        for key, parameter in zip(saved_group["params"], group["params"], strict=True):
            for name, value in saved["state"].get(key, {}).items():
                if isinstance(value, torch.Tensor):
                    optimizer.state[parameter][name] = value.to(parameter.device, torch.float32, copy=True)
