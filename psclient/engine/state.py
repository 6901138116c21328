"""Saving and restoring an optimizer's memories (residuals, momentum), and noticing when they are out of date."""

import copy
import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from psclient.compress.groups import check_hyperparameters
from psclient.compress.method import State
from psclient.engine.engine import Engine
from psclient.errors import ConfigurationError
from psclient.model.module import TrainedModel
from psclient.rpc.run import Run

log = logging.getLogger("psclient")


@dataclass(frozen=True, slots=True)
class PushMark:
    """The method, the worker's incarnation and its last push at a save; ``version`` is the coordinator's."""

    method: str
    run: str
    version: int
    worker: str
    incarnation: str
    acknowledged_step: int
    step: int

    @classmethod
    def now(cls, method: str, run: Run, engine: Engine) -> "PushMark":
        """Return the mark of a worker's last push."""
        worker, version = run.identity, run.coordinator.version
        steps = engine.acknowledged_step, engine.number
        return cls(method, worker.run_id, version, worker.worker_id, worker.incarnation, *steps)

    def plain(self) -> dict[str, Any]:
        """Return plain values for a state dict."""
        return {"format": STATE_FORMAT, **asdict(self)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "PushMark":
        """Read a dict of :meth:`plain`; keys that this release does not know are left out.

        Raises:
            ConfigurationError: the dict is of another format.
        """
        found, fields = plain.get("format"), cls.__dataclass_fields__.keys()
        if isinstance(found, int) and found > STATE_FORMAT:
            raise ConfigurationError(
                f"a newer psclient has saved this state, in format {found}, and this one reads format {STATE_FORMAT}: "
                f"install the release that saved it, or {_MODEL_ALONE}"
            )
        if found != STATE_FORMAT or not fields <= plain.keys():
            raise ConfigurationError(f"an earlier psclient has saved this state, in another format; {_MODEL_ALONE}")
        return cls(**{name: plain[name] for name in fields})


STATE_FORMAT = 1
"""Of the state that :class:`PushMark` marks; raised when the meaning of a key changes or a key is missed."""

_MODEL_ALONE = "load the model's weights alone, and begin with an empty optimizer state"


_MARK = "psclient"
"""The key of the mark in the first param group: what saves a state may keep nothing but state and groups."""


def _mark_in(state_dict: Mapping[str, Any]) -> Mapping[str, Any] | None:
    groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    found: Mapping[str, Any] | None = groups[0].get(_MARK) if isinstance(groups, list) and groups else None
    return state_dict.get(_MARK) if found is None and groups else found  # earlier formats had it beside the groups


def method_of(state_dict: Mapping[str, Any]) -> str | None:
    """Return the name of this library's method that has saved a state; ``None`` if none has."""
    mark = _mark_in(state_dict)
    return None if mark is None else str(mark.get("method"))


def without_mark(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the param groups of a state as the optimizer had them."""
    return [{name: value for name, value in group.items() if name != _MARK} for group in groups]


def _names_of_memories(state_dict: Mapping[str, Any]) -> list[str]:
    names = set()
    for memories in state_dict["state"].values():
        for prefix, found in (("", memories), ("inner ", memories.get("inner", {}))):
            names |= {prefix + name for name, value in found.items() if isinstance(value, torch.Tensor)}
    return sorted(names)


def mark_state(state_dict: dict[str, Any], mark: PushMark) -> None:
    """Put a mark, and what memories there are, into a state dict, in its first param group."""
    state_dict["param_groups"][0][_MARK] = mark.plain() | {"memories": _names_of_memories(state_dict)}


def warn_of_missing_memories(state_dict: Mapping[str, Any]) -> None:
    """Say which memories a state was saved with and has no longer."""
    saved = (_mark_in(state_dict) or {}).get("memories", [])
    if missing := sorted({*saved} - {*_names_of_memories(state_dict)}):
        log.warning(
            "this state was saved with %s, and comes without: what that held is lost. What has saved and loaded it "
            "(torch.distributed.checkpoint, say) reads only what the optimizer had when it was to be loaded",
            " and ".join(missing),
        )


def split(state_dict: Mapping[str, Any], method: str | None) -> tuple[PushMark | None, dict[str, Any]]:
    """Return the mark of a state dict (``None`` if another library saved the state), and torch's part of it.

    :class:`ConfigurationError` if another method than ``method`` saved it (``None``: any may have), or a
    hyper-parameter is out of its range.
    """
    if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get("param_groups"), list):
        raise ConfigurationError("this is no state of an optimizer: load what optimizer.state_dict() has returned")
    groups = without_mark(state_dict["param_groups"])
    for group in groups:
        check_hyperparameters(group)
    plain = {name: value for name, value in state_dict.items() if name != _MARK} | {"param_groups": groups}
    found = _mark_in(state_dict)
    mark = None if found is None else PushMark.from_plain(found)
    if mark is not None and mark.method != (method or mark.method):
        raise ConfigurationError(
            f"method {mark.method!r} has saved this state, and its memories mean something else to {method!r}: go on "
            f"with {mark.method!r}, or {_MODEL_ALONE}"
        )
    return mark, plain


def from_sgd(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], method: str, *, keeps_momentum: bool
) -> dict[str, Any]:
    """Return a state of ``torch.optim.SGD`` as one of a method: rates, weight decay, and momentum buffers.

    :class:`ConfigurationError` if the state is another optimizer's, or has momentum of another recurrence than
    ``u = m·u + g`` with the method's ``m``. A state without momentum leaves the method its own.
    """
    saved = state["param_groups"]
    if not all({"lr", "momentum", "dampening", "nesterov"} <= group.keys() for group in saved):
        raise ConfigurationError(
            f"this state is of another optimizer, and {method!r} has no place for its memories: {_MODEL_ALONE}. "
            "torch.optim.SGD's state is taken over, and psclient.Outer(inner_optimizer, …) goes on with any: load it "
            "into inner_optimizer"
        )
    if len(saved) != len(groups):
        raise ConfigurationError(f"this state has {len(saved)} param groups; make the optimizer with these, as it was")
    memories: dict[int, dict[str, Any]] = {}
    taken = []
    for theirs, ours in zip(saved, groups, strict=True):
        alike = keeps_momentum and not (theirs["dampening"] or theirs["nesterov"])
        alike &= theirs["momentum"] == ours.get("momentum")
        if (theirs["momentum"] and not alike) or theirs.get("maximize"):
            raise ConfigurationError(
                f"this state of SGD has momentum {theirs['momentum']:g}, dampening {theirs['dampening']:g}, nesterov "
                f"{theirs['nesterov']} and maximize {theirs.get('maximize')}, and {method!r} as made here does not go "
                f"on with that: {_MODEL_ALONE}, or go on with psclient.ASGD or SSGD and the same momentum, which have "
                "no dampening, nesterov or maximize, or with psclient.WAGMA(inner_optimizer, …), which goes on with any"
            )
        for key in theirs["params"]:
            buffer = state["state"].get(key, {}).get("momentum_buffer")
            if buffer is not None:
                memories[key] = {"momentum": buffer.float().reshape(-1)}
        same = {name: theirs[name] for name in ("params", "lr", "weight_decay", "initial_lr") if name in theirs}
        taken.append({**ours, **same})
    return {"state": memories, "param_groups": taken}


def stale_residuals(mark: PushMark, now: PushMark, record: tuple[str, int] | None) -> bool:
    """Return whether residuals saved at ``mark`` were sent since.

    ``record`` is (incarnation, step) of the last push of this worker's name that the server had applied at the join.
    """
    if now.acknowledged_step or mark.incarnation == now.incarnation:
        record = now.incarnation, now.acknowledged_step
    return record is not None and record != (mark.incarnation, mark.acknowledged_step)


def is_out_of_date(mark: PushMark, now: PushMark, record: tuple[str, int] | None, *, server_remembers: bool) -> bool:
    """Tell whether residuals saved at ``mark`` are to be dropped, and log why; ``record`` as :func:`stale_residuals`.

    ``server_remembers``: the server's optimizer has a memory, which is not in the state.
    """
    if server_remembers and mark.run != now.run and now.version < mark.version:
        log.warning(
            "this state is of version %d of run %s, and run %s is at version %d: moments and schedule of the server's "
            "optimizer begin anew. The server keeps them: through restarts with psservice serve --data-dir DIR, and "
            "another run begins with them by --init DIR",
            mark.version,
            mark.run,
            now.run,
            now.version,
        )
    if mark.worker != now.worker:
        log.warning(
            "this state is of worker %s, and this is worker %s: its residuals are dropped, as that one may send them "
            "too; to go on with them give this worker that name (worker=, PSCLIENT_WORKER)",
            mark.worker,
            now.worker,
        )
        return True
    stale = stale_residuals(mark, now, record)
    if stale:
        log.warning(
            "this state was saved at step %d of worker %s, and the server has applied a later push: its residuals "
            "were sent since and are dropped; training goes on from the server's parameters",
            mark.acknowledged_step,
            mark.worker,
        )
    return stale


def state_as_refused(
    memories: MutableMapping[torch.Tensor, State], engine: Engine, state_dict: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return a state dict as if an unanswered push had been refused; the memories stay as they are."""
    unacked = engine.unacked_parts()
    if not unacked:
        return state_dict()
    kept = {parameter: copy.deepcopy(memory) for parameter, memory in memories.items()}
    engine.restore(unacked)
    state = copy.deepcopy(state_dict())
    memories.update(kept)
    return state


def check_memories(saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], model: TrainedModel) -> None:
    """Raise :class:`ConfigurationError` if a memory of a saved state has another size than its parameter, or NaN."""
    specs = model.layout.parameters
    names = {id(parameter): spec.name for parameter, spec in zip(model.parameters, specs, strict=True)}
    for saved_group, group in zip(saved["param_groups"], groups, strict=False):  # torch refuses other groups
        for key, parameter in zip(saved_group["params"], group["params"], strict=False):
            for memory, value in saved["state"].get(key, {}).items():
                what = f"{memory} of {names.get(id(parameter), key)!r}"
                if isinstance(value, torch.Tensor) and value.numel() != parameter.numel():
                    raise ConfigurationError(
                        f"this state's {what} has {value.numel()} elements, and the parameter {parameter.numel()}: the "
                        f"state is another model's; {_MODEL_ALONE}"
                    )
                numbers = list(value.values()) if isinstance(value, Mapping) else []
                is_sound = not any(number != number for number in numbers)  # a threshold may be infinite
                if isinstance(value, torch.Tensor):
                    is_sound = bool(value.isfinite().all())
                if not is_sound:
                    raise ConfigurationError(
                        f"this state's {what} is not finite: it was broken before it was saved. Load an earlier one, "
                        f"or {_MODEL_ALONE}"
                    )


def restore_memories(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore every saved tensor in fp32: ``torch`` has cast it to its parameter's dtype, which may be narrower."""
    for saved_group, group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        for key, parameter in zip(saved_group["params"], group["params"], strict=True):
            for name, value in saved["state"].get(key, {}).items():
                if isinstance(value, torch.Tensor):
                    optimizer.state[parameter][name] = value.to(parameter.device, torch.float32, copy=True)
