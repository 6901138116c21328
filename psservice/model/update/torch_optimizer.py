"""A ``torch.optim`` optimizer on the server, with a scheduler: workers push gradients, the server takes the steps.

Absent entries of a sparse push are gradients of zero, so a step changes nearly everything; ``lazy`` touches only the
entries that were sent, parameters and optimizer state alike.
"""

import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import ErrorCode, Rejected
from psservice.model.changelog import ChangedIndices, offset_dtype
from psservice.model.update.base import PLAIN, PushContext, RuleContext, RuleMaker, RuleState
from psservice.model.update.reshard import PieceMemory, RuleMemory, reshard
from psservice.model.update.specs import (
    ELEMENTWISE,
    LAZY,
    TORCH_ERRORS,
    OptimizerSpec,
    SchedulerSpec,
    bad,
    check_options,
    sane_rate,
)

log = logging.getLogger(__name__)

_LARGEST_GRADIENT = 1e18  # its square is finite
_MOST_GROUPS = 1 << 13
_MOST_FAILED = 1000  # steps of a scheduler in a row, from which on it is at its end
_MOST_DIGITS = 15  # of a number of versions or samples
_MOST_SCHEDULED = 10_000  # steps of a scheduler for the samples of one push; more of them are not counted
_LARGEST_PARAMETER = 1e30  # a step of a sane rate does not take it out of its range


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors (positions in the layout, ascending) that share options where these differ from the optimizer's."""

    tensors: tuple[int, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """A run's optimizer: no groups for every tensor, the scheduler steps every so many updates or samples."""

    optimizer: OptimizerSpec
    groups: tuple[Group, ...]
    scheduler: SchedulerSpec | None
    every: int
    by_samples: bool
    lazy: bool


def maker(settings: Mapping[str, str]) -> RuleMaker:
    """Read the method settings of an optimizer; raises :class:`Rejected` (``BAD_REQUEST``)."""
    spec = OptimizerSpec.parse(settings.get("optimizer", ""))
    scheduler = SchedulerSpec.parse(settings["scheduler"]) if settings.get("scheduler") else None
    groups = _groups(spec.name, settings.get("groups", ""))
    spec.try_out([group.options for group in groups] or [{}], scheduler)
    every, by_samples, unit = settings.get("scheduler_every", "1").partition(" samples")
    if unit or not (every.isascii() and every.isdigit() and len(every) < _MOST_DIGITS and int(every)):
        raise bad(f"scheduler_every must be a number of versions, or of samples ('50 samples'), not {every!r}")
    lazy = settings.get("lazy", "false") == "true"
    if lazy and spec.name not in LAZY:
        raise bad(f"{spec.name} cannot be lazy; {', '.join(sorted(LAZY))} can")
    read = TorchSettings(spec, groups, scheduler, int(every), bool(by_samples), lazy)
    return lambda context: TorchOptimizer(context, read)


def _groups(name: str, text: str) -> tuple[Group, ...]:
    if not text:
        return ()
    try:
        listed = json.loads(text)
        if len(listed) > _MOST_GROUPS:
            raise bad(f"an optimizer has at most {_MOST_GROUPS} groups here, not {len(listed)}")
        found = [Group(tuple(each["tensors"]), check_options(name, each.get("options", {}))) for each in listed]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise bad(f"the optimizer's groups cannot be read: {error}") from error
    positions = [position for group in found for position in group.tensors]
    if any(not isinstance(p, int) or isinstance(p, bool) or p < 0 for p in positions):
        raise bad("the optimizer's groups name tensors by their positions in the layout")
    if len(set(positions)) < len(positions):
        raise bad("a tensor is in more than one of the optimizer's groups")
    return tuple(found)


class TorchOptimizer:
    """Steps a ``torch.optim`` optimizer with every push as its gradient (``BAD_REQUEST``: not with this model)."""

    def __init__(self, context: RuleContext, settings: TorchSettings) -> None:
        self._context, self._settings = context, settings
        self._pieces: list[tuple[Span, torch.Tensor]] = []
        groups = settings.groups or (Group(tuple(range(len(context.layout.parameters))), {}),)
        if any(group.tensors and max(group.tensors) >= len(context.layout.parameters) for group in groups):
            raise bad("the optimizer's groups name tensors that the model does not have")
        made = []
        for group in groups:
            pieces = list(self._tensors(group))
            self._pieces += pieces  # an empty group stays: a scheduler may have a number for each
            made.append({**group.options, "params": [tensor for _, tensor in pieces]})
        self._optimizer: Optimizer | None = settings.optimizer.make(made) if self._pieces else None
        default = settings.optimizer.rate
        self.rates = tuple(float(group.options.get("lr", default)) for group in groups)
        self._scheduler = settings.scheduler.make(self._optimizer) if settings.scheduler and self._optimizer else None
        self._updates = self._samples = 0
        self.densifies = not settings.lazy
        self._dtype = offset_dtype(context.span.length)

    def apply(self, push: SparseSlice | None, context: PushContext = PLAIN) -> ChangedIndices:
        """Step once; a push without entries is no step, and its samples count."""
        support: ChangedIndices = torch.empty(0, dtype=self._dtype)
        if self._optimizer is None:
            return support
        before = self._scheduled
        if push is not None:
            self._require_sane(push)
            with self._at_rates(self._optimizer, context.group_rates or self.rates):
                if self._settings.lazy and push.offsets is not None:
                    support = self._step_lazily(self._optimizer, push)
                else:
                    self._step(self._optimizer, push)
                    support = None
            self._updates += 1
        self._samples += min(context.samples, _MOST_SCHEDULED * self._settings.every)
        if self._scheduler is not None:
            self._advance_schedule(self._scheduled - before)
        return support

    def export(self) -> RuleState:
        """Copy the optimizer's state; the schedule follows from the number of updates."""
        return _as_rule_state(self._updates, self._samples, self._states(), lambda tensor: tensor.detach().clone())

    def restore(self, state: RuleState) -> None:
        """Restore the optimizer's state, and step the scheduler to where it was."""
        restored: dict[int, dict[str, Any]] = {int(n): dict(values) for n, values in state.plain["state"].items()}
        for name, tensor in state.tensors.items():
            number, _, key = name.partition(".")
            restored.setdefault(int(number), {})[key] = tensor
        self._updates, self._samples = int(state.plain["updates"]), int(state.plain["samples"])
        if self._scheduler is not None:
            self._advance_schedule(self._scheduled)
        if self._optimizer is not None:
            whole = self._optimizer.state_dict()
            order = [tensor for group in self._optimizer.param_groups for tensor in group["params"]]
            places = {id(tensor): place for place, tensor in enumerate(order)}
            whole["state"] = {places[id(self._pieces[n][1])]: values for n, values in restored.items()}
            self._optimizer.load_state_dict(whole)

    def export_portable(self) -> RuleMemory:
        """Return the optimizer's state by entries of the layout."""
        pieces = [
            PieceMemory(span, tuple(tensor.shape), state)
            for (span, tensor), state in zip(self._pieces, self._states(), strict=True)
        ]
        return RuleMemory(self._settings.optimizer.name, self._updates, self._samples, pieces)

    def import_portable(self, memories: Sequence[RuleMemory]) -> None:
        """Put the optimizer's state together from the states of shards with other borders."""
        pieces = [piece for memory in memories for piece in memory.pieces]
        device = self._context.theta.device
        self.restore(
            _as_rule_state(
                max(memory.updates for memory in memories),
                max(memory.samples for memory in memories),
                [reshard(pieces, span, tuple(tensor.shape)) for span, tensor in self._pieces],
                lambda tensor: tensor.to(device) if tensor.dim() else tensor,
            )
        )

    def _states(self) -> Iterator[dict[str, Any]]:
        """Yield a copy of the optimizer's state of each piece."""
        states = self._optimizer.state if self._optimizer else {}
        for _, tensor in self._pieces:
            yield dict(states[tensor])

    @property
    def _scheduled(self) -> int:
        return (self._samples if self._settings.by_samples else self._updates) // self._settings.every

    @contextmanager
    def _at_rates(self, optimizer: Optimizer, asked: Sequence[float]) -> Iterator[None]:
        """Step at the rates that a push asks for; where the scheduler has moved a group's, in proportion to that."""
        scheduled = [group["lr"] for group in optimizer.param_groups]
        for group, agreed, rate in zip(optimizer.param_groups, self.rates, asked, strict=True):
            if rate != agreed:
                moved = agreed and group["lr"] != agreed
                group["lr"] = sane_rate(group["lr"] * (rate / agreed)) if moved else rate
        try:
            yield
        finally:
            for group, rate in zip(optimizer.param_groups, scheduled, strict=True):
                group["lr"] = rate

    def _tensors(self, group: Group) -> Iterator[tuple[Span, torch.Tensor]]:
        """Yield a group's tensors inside the shard: in their shapes, or flat where a shard's end cuts one.

        Where steps are lazy, a scalar has one dimension: what is kept for its entry must not look like a counter.

        One by one, and not in long runs: torch's kernels round the last elements of a tensor in another way than those
        before, so only the same tensors get the same bits as at home.
        """
        layout = self._context.layout
        for position in sorted(group.tensors):
            tensor = layout.span(position)
            inside = tensor.intersect(self._context.span)
            if not inside.length:
                continue
            spec = layout.parameters[position]
            if inside == tensor:
                yield inside, self._view(inside).view(spec.shape or ((1,) if self._settings.lazy else ()))
            elif self._settings.optimizer.name in ELEMENTWISE:
                yield inside, self._view(inside)
            else:
                raise bad(
                    f"{self._settings.optimizer.name} needs tensors whole, and {spec.name!r} is cut between two "
                    f"shards; use one shard, or one of {', '.join(sorted(ELEMENTWISE))}"
                )

    def _view(self, span: Span) -> torch.Tensor:
        start = self._context.span.start
        return self._context.theta[span.start - start : span.end - start]

    def _require_sane(self, push: SparseSlice) -> None:
        if push.entries and bool(push.values.abs().max() > _LARGEST_GRADIENT):
            raise Rejected(ErrorCode.NON_FINITE, f"a gradient above {_LARGEST_GRADIENT:g} is not taken")
        theta = self._context.theta
        touched = theta[push.offsets] if self._settings.lazy and push.offsets is not None else theta
        if touched.numel() and not bool(touched.abs().max() <= _LARGEST_PARAMETER):
            raise Rejected(ErrorCode.NON_FINITE, f"a parameter has grown above {_LARGEST_PARAMETER:g}")

    def _step(self, optimizer: Optimizer, push: SparseSlice) -> None:
        """Step with the push as the whole gradient, zero where it has no entry."""
        for span, tensor in self._pieces:
            part = push.clip(span)
            if part is not None and part.offsets is None and part.span == span:
                tensor.grad = part.values.view(tensor.shape)
                continue
            gradient = torch.zeros_like(tensor).view(-1)
            if part is not None:
                shift = part.span.start - span.start
                if part.offsets is None:
                    gradient[shift : shift + part.span.length] = part.values
                else:
                    gradient[part.offsets + shift] = part.values
            tensor.grad = gradient.view(tensor.shape)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _step_lazily(self, optimizer: Optimizer, push: SparseSlice) -> ChangedIndices:
        """Step the sent entries as if they were the whole of their tensors."""
        touched = []
        group_of = {id(t): group for group in optimizer.param_groups for t in group["params"]}
        for span, tensor in self._pieces:
            part = push.clip(span)
            if part is None or part.offsets is None:
                continue
            offsets = part.offsets + (part.span.start - span.start)
            state = optimizer.state[tensor]
            full = {name for name, value in state.items() if _like(value, tensor)}
            flat = tensor.view(-1)
            small = flat[offsets]
            small.grad = part.values
            options = {name: value for name, value in group_of[id(tensor)].items() if name != "params"}
            kind: type[Any] = type(optimizer)
            stand_in: Optimizer = kind([{**options, "params": [small]}])
            stand_in.state[small] = {n: value.view(-1)[offsets] if n in full else value for n, value in state.items()}
            stand_in.step()
            flat[offsets] = small
            for name, value in stand_in.state[small].items():
                if _like(value, small):
                    state.setdefault(name, torch.zeros_like(tensor)).view(-1)[offsets] = value
                else:
                    state[name] = value
            touched.append(offsets + (span.start - self._context.span.start))
        if not touched:
            return torch.empty(0, dtype=self._dtype)
        return torch.cat(touched).sort().values.to(self._dtype)  # groups need not follow the layout

    def _advance_schedule(self, steps: int) -> None:
        """Step the scheduler; one that is at its end (``OneCycleLR``) leaves the rate where it is."""
        assert self._scheduler is not None
        assert self._optimizer is not None
        with warnings.catch_warnings():  # torch would have its own optimizer stepped first
            warnings.simplefilter("ignore")
            failed = 0
            for _ in range(steps):
                try:
                    self._scheduler.step()
                    failed = 0
                except TORCH_ERRORS as error:  # the parameters have been stepped: there is no way back
                    log.debug("the schedule is at its end", extra={"why": str(error)})
                    failed += 1
                    if failed == _MOST_FAILED:
                        return
                for group in self._optimizer.param_groups:
                    group["lr"] = sane_rate(group["lr"])


def _like(value: object, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape


def _as_rule_state(
    updates: int, samples: int, states: Iterable[Mapping[str, Any]], copy: Callable[[torch.Tensor], torch.Tensor]
) -> RuleState:
    """Write the state of each piece, tensors as ``NUMBER.NAME``."""
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for number, state in enumerate(states):
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{number}.{name}"] = copy(value)
            else:
                plain.setdefault(str(number), {})[name] = value
    return RuleState({"updates": updates, "samples": samples, "state": plain}, tensors)
