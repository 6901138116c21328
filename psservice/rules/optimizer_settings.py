"""Reading a ``torch.optim`` optimizer and its scheduler from a worker's settings: names and numbers, no code.

Everything here that reads raises :class:`Rejected` (``BAD_REQUEST``).
"""

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler

from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.messages import LARGEST_RATE

_CLOSURES_OR_SPARSE = frozenset({"LBFGS", "SparseAdam", "Optimizer"})
_NOT_OPTIONS = frozenset({"self", "params", "foreach", "fused", "capturable", "differentiable"})
_NEEDS_CODE_OR_METRIC = frozenset({"LambdaLR", "MultiplicativeLR", "ReduceLROnPlateau"})
_NOT_SCHEDULERS = frozenset({"LRScheduler", "_LRScheduler"})
_MOST_NESTED = 4
_MOST_BYTES = 64 << 10
_MOST_GROUPS = 1 << 13
_MOST_SCHEDULERS = 16
_MOST_DIGITS = 15  # of a number of versions or samples
_LARGEST_NUMBER = 1e300

TORCH_ERRORS = (TypeError, ValueError, RuntimeError, LookupError, ArithmeticError, AttributeError)
"""What torch raises if it does not accept a value."""

ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop"}
)
"""Optimizers whose step of an element depends on that element alone, so tensors may be joined and cut."""

LAZY = ELEMENTWISE - {"ASGD", "Rprop"}
"""Elementwise optimizers whose state begins at zero, so an entry's state may begin when it is first sent."""


def optimizers() -> dict[str, type[Optimizer]]:
    """Return every optimizer of ``torch.optim`` that works from gradients alone, by name."""
    found = inspect.getmembers(torch.optim, inspect.isclass)
    return {name: kind for name, kind in found if issubclass(kind, Optimizer) and name not in _CLOSURES_OR_SPARSE}


def schedulers() -> dict[str, type[lr_scheduler.LRScheduler]]:
    """Return every scheduler that needs no function and no metric, by name."""
    left_out = _NEEDS_CODE_OR_METRIC | _NOT_SCHEDULERS
    found = inspect.getmembers(lr_scheduler, inspect.isclass)
    return {n: kind for n, kind in found if issubclass(kind, lr_scheduler.LRScheduler) and n not in left_out}


def bad(detail: str) -> Rejected:
    """Return the error of settings that make no sense."""
    return Rejected(ErrorCode.BAD_REQUEST, detail)


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors (positions in the layout, ascending) that share options if these differ from the optimizer's."""

    tensors: tuple[int, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """A run's optimizer, without groups for every tensor; the scheduler steps every so many updates or samples."""

    optimizer: "OptimizerSpec"
    groups: tuple[Group, ...]
    scheduler: "SchedulerSpec | None"
    every: int
    by_samples: bool
    lazy: bool

    @classmethod
    def parse(cls, settings: Mapping[str, str]) -> "TorchSettings":
        """Read the method settings."""
        spec = OptimizerSpec.parse(settings.get("optimizer", ""))
        scheduler = SchedulerSpec.parse(settings["scheduler"]) if settings.get("scheduler") else None
        groups = _groups(spec.name, settings["groups"]) if settings.get("groups") else ()
        _try_out(spec, [group.options for group in groups] or [{}], scheduler)
        every, by_samples, unit = settings.get("scheduler_every", "1").partition(" samples")
        if unit or not (every.isascii() and every.isdigit() and len(every) < _MOST_DIGITS and int(every)):
            raise bad(f"scheduler_every must be a number of versions, or of samples ('50 samples'), not {every!r}")
        lazy = settings.get("lazy", "false") == "true"
        if lazy and spec.name not in LAZY:
            raise bad(f"{spec.name} cannot be lazy; {', '.join(sorted(LAZY))} can")
        return cls(spec, groups, scheduler, int(every), bool(by_samples), lazy)


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer by name, with its options."""

    name: str
    options: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> "OptimizerSpec":
        """Read ``{"name": "RMSprop", "options": {"lr": 0.01}}``."""
        found = _mapping(text, "optimizer", {"name", "options"})
        name = _name(found)
        if name not in optimizers():
            hint = "; Adam with lazy=True steps the entries that are sent alone" if name == "SparseAdam" else ""
            raise bad(f"there is no optimizer {name!r} here; there are {', '.join(optimizers())}{hint}")
        return cls(name, _checked(name, found.get("options", {})))

    @property
    def rate(self) -> float:
        """Learning rate of a param group without one of its own."""
        default = inspect.signature(optimizers()[self.name].__init__).parameters["lr"].default
        return float(self.options.get("lr", default))

    def make(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Make the optimizer over param groups."""
        with _torch_accepts(f"torch.optim.{self.name} does not take that"):
            return optimizers()[self.name](groups, **self.options)


@dataclass(frozen=True, slots=True)
class SchedulerSpec:
    """A scheduler by name, with its options, and the schedulers inside it."""

    name: str
    options: Mapping[str, Any]
    inner: tuple["SchedulerSpec", ...] = ()

    @classmethod
    def parse(cls, text: str) -> "SchedulerSpec":
        """Read ``{"name": "StepLR", "options": {"step_size": 100}}``.

        ``SequentialLR`` and ``ChainedScheduler`` have ``"schedulers"``, a list of the same form.
        """
        return cls._of(_mapping(text, "scheduler", {"name", "options", "schedulers"}), 0)

    @classmethod
    def _of(cls, found: object, depth: int) -> "SchedulerSpec":
        if not isinstance(found, dict) or depth > _MOST_NESTED or found.keys() - {"name", "options", "schedulers"}:
            raise bad("a scheduler is a name, options, and perhaps schedulers inside it, not too deep")
        name, options, inner = _name(found), found.get("options", {}), found.get("schedulers", [])
        if name in _NEEDS_CODE_OR_METRIC:
            raise bad(f"{name} needs a function or a metric, which cannot be sent; choose another")
        if name not in schedulers():
            raise bad(f"there is no scheduler {name!r} here; there are {', '.join(schedulers())}")
        if not isinstance(options, dict) or not isinstance(inner, list) or len(inner) > _MOST_SCHEDULERS:
            raise bad(f"options of {name} must be a mapping, schedulers a list of at most {_MOST_SCHEDULERS}")
        for option, value in options.items():
            _require_plain(f"{name}.{option}", value)
        return cls(name, options, tuple(cls._of(each, depth + 1) for each in inner))

    def make(self, optimizer: Optimizer) -> lr_scheduler.LRScheduler:
        """Make the scheduler over an optimizer."""
        inner = [spec.make(optimizer) for spec in self.inner]
        kind: Any = schedulers()[self.name]
        arguments = [inner] if self.name == "ChainedScheduler" else [optimizer, *([inner] if inner else [])]
        with _torch_accepts(f"lr_scheduler.{self.name} does not take that"):
            made: lr_scheduler.LRScheduler = kind(*arguments, **self.options)
            return made


@contextmanager
def _torch_accepts(what: str) -> Iterator[None]:
    """Turn torch's errors into :func:`bad`."""
    try:
        yield
    except TORCH_ERRORS as error:
        raise bad(f"{what}: {error}") from error


def sane_rate(rate: Any) -> float:
    """Return a scheduler's learning rate within bounds; 0 if that is no such number."""
    return min(rate, LARGEST_RATE) if isinstance(rate, int | float) and rate >= 0 else 0.0


def _groups(name: str, text: str) -> tuple[Group, ...]:
    try:
        listed = json.loads(text)
        if len(listed) > _MOST_GROUPS:
            raise bad(f"an optimizer has at most {_MOST_GROUPS} groups here, not {len(listed)}")
        found = [Group(tuple(each["tensors"]), _checked(name, each.get("options", {}))) for each in listed]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise bad(f"the optimizer's groups cannot be read: {error}") from error
    positions = [position for group in found for position in group.tensors]
    if any(not isinstance(p, int) or isinstance(p, bool) or p < 0 for p in positions):
        raise bad("the optimizer's groups name tensors by their positions in the layout")
    if len(set(positions)) < len(positions):
        raise bad("a tensor is in more than one of the optimizer's groups")
    return tuple(found)


def _try_out(spec: OptimizerSpec, groups: Sequence[Mapping[str, Any]], scheduler: SchedulerSpec | None) -> None:
    """Step optimizer and scheduler over one element a group: on the apply thread a mistake is found too late.

    ``groups`` are the own options of each param group.
    """
    elements = [torch.zeros(1, 1, dtype=torch.float32, device="cpu") for _ in groups]
    distinct = {json.dumps(own, sort_keys=True): number for number, own in enumerate(groups)}
    for number in distinct.values():  # torch checks the options of a group only if they are the optimizer's
        OptimizerSpec(spec.name, {**spec.options, **groups[number]}).make([{"params": [elements[number]]}])
        elements[number].grad = torch.ones_like(elements[number])
    made = spec.make([{**own, "params": [element]} for own, element in zip(groups, elements, strict=True)])
    schedule = scheduler.make(made) if scheduler is not None else None
    with _torch_accepts(f"torch.optim.{spec.name}, or its scheduler, cannot be stepped"):
        made.step()
        if schedule is not None:
            schedule.step()


def _checked(name: str, options: object) -> dict[str, Any]:
    """Return an optimizer's options, all of them known, finite and sane."""
    if not isinstance(options, dict):
        raise bad(f"options of {name} must be a mapping")
    known = inspect.signature(optimizers()[name].__init__).parameters.keys() - _NOT_OPTIONS
    for option, value in options.items():
        if option not in known:
            raise bad(f"{name} has no option {option!r} that can be set here; it has {', '.join(sorted(known))}")
        _require_plain(f"{name}.{option}", value)
        if option == "lr" and not (_is_number(value) and 0 <= value <= LARGEST_RATE):
            raise bad(f"lr of {name} must be from 0 to {LARGEST_RATE:g}, not {value!r}")
        if option == "eps" and not all(_is_number(one) and one > 0 for one in _flat(value)):
            raise bad(f"eps of {name} must be above 0: a gradient of zero would make a parameter NaN")
    return options


def _mapping(text: str, what: str, keys: set[str]) -> dict[str, Any]:
    if len(text) > _MOST_BYTES:
        raise bad(f"the {what} is described in {len(text)} characters, at most {_MOST_BYTES} are read")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise bad(f"the {what} is not JSON: {error}") from error
    if not isinstance(found, dict) or found.keys() - keys:
        raise bad(f"the {what} must be a mapping with {', '.join(sorted(keys))}")
    return found


def _name(found: Mapping[str, Any]) -> str:
    name = found.get("name")
    if not isinstance(name, str):
        raise bad("a name must be a word")
    return name


def _flat(value: Any, depth: int = 0) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value]
    if depth == _MOST_NESTED:
        raise bad("a list of options is nested too deep")
    return [one for each in value for one in _flat(each, depth + 1)]


def _require_plain(name: str, value: Any) -> None:
    """Admit numbers, words, truth values and short lists of them."""
    flat = _flat(value)
    if len(flat) > 1000:
        raise bad(f"{name} is too long")
    for one in flat:
        if isinstance(one, bool) or one is None or (isinstance(one, str) and len(one) < 64):
            continue
        if not isinstance(one, int | float) or not abs(one) <= _LARGEST_NUMBER:
            raise bad(f"{name} is not a finite number, a word, or a list of those")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
