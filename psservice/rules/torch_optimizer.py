"""A ``torch.optim`` optimizer on the server, with a scheduler: workers push gradients, the server takes the steps.

Absent entries of a sparse push are gradients of zero, so a step changes nearly everything; ``lazy`` touches only the
entries that were sent, parameters and optimizer state alike.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import ErrorCode, Rejected
from psservice.rules.base import PLAIN, PieceState, PortableState, PushContext, RuleState, UpdateRule
from psservice.rules.changed import ChangedIndices, changed_by, offset_dtype
from psservice.rules.optimizer_settings import ELEMENTWISE, TORCH_ERRORS, Group, TorchSettings, bad, sane_rate

log = logging.getLogger(__name__)

_LARGEST_GRADIENT = 1e18  # its square is finite
_MOST_FAILED = 1000  # steps of a scheduler in a row, from which on it is at its end
_MOST_SCHEDULED = 10_000  # steps of a scheduler for the samples of one push; more of them are not counted
_LARGEST_PARAMETER = 1e30  # a step of a sane rate does not take it out of its range


class TorchOptimizer(UpdateRule):
    """Steps a ``torch.optim`` optimizer with every push as its gradient (``BAD_REQUEST``: not with this model)."""

    def __init__(self, settings: TorchSettings, layout: ModelLayout, span: Span, theta: torch.Tensor) -> None:
        self._settings, self._layout, self._span, self._theta = settings, layout, span, theta
        self.kind, self.densifies = settings.optimizer.name, not settings.lazy
        self._pieces: list[tuple[Span, torch.Tensor]] = []
        groups = settings.groups or (Group(tuple(range(len(layout.parameters))), {}),)
        if any(group.tensors and max(group.tensors) >= len(layout.parameters) for group in groups):
            raise bad("the optimizer's groups name tensors that the model does not have")
        made = []
        for group in groups:
            pieces = list(self._tensors(group))
            self._pieces += pieces  # an empty group stays: a scheduler may have a number for each
            made.append({**group.options, "params": [tensor for _, tensor in pieces]})
        edges = [(piece.start - span.start, piece.end - span.start) for piece, _ in self._pieces]
        self._borders = torch.tensor(edges, dtype=torch.int64, device="cpu").to(theta.device)
        self._optimizer: Optimizer | None = settings.optimizer.make(made) if self._pieces else None
        default = settings.optimizer.rate
        self.rates = tuple(float(group.options.get("lr", default)) for group in groups)
        self._scheduler = settings.scheduler.make(self._optimizer) if settings.scheduler and self._optimizer else None
        if self._scheduler is not None and self._optimizer is not None:
            # Without gradients nothing is changed. Else torch warns of a schedule that is stepped before its optimizer:
            # one that is restored, or whose steps are lazy.
            self._optimizer.step()
        self._updates = self._samples = 0

    def apply(self, push: SparseSlice | None, context: PushContext = PLAIN) -> ChangedIndices:
        """Step once; a push without entries is no step, and its samples count."""
        changed = changed_by(None)
        if self._optimizer is None:
            return changed
        before = self._scheduled
        if push is not None:
            self._require_sane(push)
            with self._at_rates(self._optimizer, context.group_rates or self.rates):
                if self._settings.lazy and push.offsets is not None:
                    changed = self._step_lazily(self._optimizer, push.offsets, push.values)
                else:
                    self._step(self._optimizer, push)
                    changed = None
            self._updates += 1
        self._samples += min(context.samples, _MOST_SCHEDULED * self._settings.every)
        self._advance_schedule(self._scheduled - before)
        return changed

    def export(self) -> RuleState:
        """Return the optimizer's state, tensors as ``PIECE.NAME``; the schedule follows from the number of updates."""
        tensors: dict[str, torch.Tensor] = {}
        plain: dict[str, dict[str, Any]] = {}
        for number, piece in enumerate(self._states()):
            for name, value in piece.state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{number}.{name}"] = value
                else:
                    plain.setdefault(str(number), {})[name] = value
        return RuleState({"updates": self._updates, "samples": self._samples, "state": plain}, tensors)

    def restore(self, state: RuleState) -> None:
        """Restore the optimizer's state, and step the scheduler to where it was."""
        states: dict[int, dict[str, Any]] = {int(n): dict(values) for n, values in state.plain["state"].items()}
        for name, tensor in state.tensors.items():
            number, _, key = name.partition(".")
            states.setdefault(int(number), {})[key] = tensor
        self._restore(int(state.plain["updates"]), int(state.plain["samples"]), states)

    def export_portable(self) -> PortableState:
        """Return the optimizer's state by entries of the layout."""
        return PortableState(self.kind, self._updates, self._samples, list(self._states()))

    def import_portable(self, states: Sequence[PortableState]) -> bool:
        """Put the optimizer's state together from the states of shards with other borders."""
        if not super().import_portable(states):
            return False
        pieces = [piece for state in states for piece in state.pieces]
        resharded = [reshard(pieces, span, tuple(tensor.shape)) for span, tensor in self._pieces]
        self._restore(
            max(state.updates for state in states),
            max(state.samples for state in states),
            {number: state for number, state in enumerate(resharded) if state},
        )
        return True

    def _states(self) -> Iterator[PieceState]:
        states = self._optimizer.state if self._optimizer else {}
        for span, tensor in self._pieces:
            yield PieceState(span, tuple(tensor.shape), dict(states[tensor]))

    def _restore(self, updates: int, samples: int, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Restore the counts, and the optimizer's state by the number of the piece; torch moves tensors to devices."""
        self._updates, self._samples = updates, samples
        self._advance_schedule(self._scheduled)
        if self._optimizer is not None:
            whole = self._optimizer.state_dict()
            order = [tensor for group in self._optimizer.param_groups for tensor in group["params"]]
            places = {id(tensor): place for place, tensor in enumerate(order)}
            whole["state"] = {places[id(self._pieces[n][1])]: values for n, values in states.items()}
            self._optimizer.load_state_dict(whole)

    @property
    def _scheduled(self) -> int:
        return (self._samples if self._settings.by_samples else self._updates) // self._settings.every

    @contextmanager
    def _at_rates(self, optimizer: Optimizer, asked: Sequence[float]) -> Iterator[None]:
        """Step at the rates that a push asks for; if the scheduler has moved a group's, in proportion to that."""
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
        """Yield a group's tensors inside the shard: in their shapes, or flat if a shard's end cuts one.

        If steps are lazy, a scalar has one dimension: what is kept for its entry must not look like a counter.

        One by one, and not in long runs: torch's kernels round the last elements of a tensor in another way than those
        before, so only the same tensors get the same bits as at home.
        """
        start = self._span.start
        for position in sorted(group.tensors):
            inside = self._layout.span(position).intersect(self._span)
            if not inside.length:
                continue
            flat, spec = self._theta[inside.start - start : inside.end - start], self._layout.parameters[position]
            if inside.length == spec.numel:
                yield inside, flat.view(spec.shape or ((1,) if self._settings.lazy else ()))
            elif self.kind in ELEMENTWISE:
                yield inside, flat
            else:
                raise bad(
                    f"{self.kind} needs tensors whole, and {spec.name!r} is cut between two "
                    f"shards; use one shard, or one of {', '.join(sorted(ELEMENTWISE))}"
                )

    def _require_sane(self, push: SparseSlice) -> None:
        if not push.entries:
            return
        touched = self._theta[push.offsets] if self._settings.lazy and push.offsets is not None else self._theta
        least, most, low, high = torch.stack([*push.values.aminmax(), *touched.aminmax()]).tolist()
        if max(-least, most) > _LARGEST_GRADIENT:
            raise Rejected(ErrorCode.NON_FINITE, f"a gradient above {_LARGEST_GRADIENT:g} is not taken")
        if not max(-low, high) <= _LARGEST_PARAMETER:
            raise Rejected(ErrorCode.NON_FINITE, f"a parameter has grown above {_LARGEST_PARAMETER:g}")

    def _step(self, optimizer: Optimizer, push: SparseSlice) -> None:
        """Step with the push as the whole gradient, zero if it has no entry."""
        gradient = push.values
        if push.offsets is not None:
            gradient = torch.zeros_like(self._theta)
            gradient[push.offsets] = push.values
        for span, tensor in self._pieces:
            first = span.start - self._span.start
            tensor.grad = gradient[first : first + span.length].view(tensor.shape)
        self.overwrites(self._theta, None)
        for value in _tensors_of(optimizer):
            self.overwrites(value, None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _step_lazily(self, optimizer: Optimizer, offsets: torch.Tensor, gradient: torch.Tensor) -> ChangedIndices:
        """Step the sent entries as if they were the whole of their tensors."""
        values = self._theta[offsets]
        bounds = torch.searchsorted(offsets, self._borders).tolist()  # the host waits here, once for all tensors
        sent = {}
        for (span, tensor), (first, last) in zip(self._pieces, bounds, strict=True):
            if first < last:
                small = values[first:last]
                small.grad = gradient[first:last]
                sent[tensor] = small, offsets[first:last] - (span.start - self._span.start)
        if not sent:
            return changed_by(None)
        kind: type[Any] = type(optimizer)
        stand_in: Optimizer = kind(
            [
                {**group, "params": [sent[tensor][0] for tensor in group["params"] if tensor in sent]}
                for group in optimizer.param_groups
            ]
        )
        for tensor, (small, place) in sent.items():
            stand_in.state[small] = {
                name: value.view(-1)[place] if _like(value, tensor) else value
                for name, value in optimizer.state[tensor].items()
            }
        stand_in.step()
        self.overwrites(self._theta, offsets)
        self._theta[offsets] = values
        for tensor, (small, place) in sent.items():
            state = optimizer.state[tensor]
            for name, value in stand_in.state[small].items():
                if _like(value, small):
                    mine = state.setdefault(name, torch.zeros_like(tensor))
                    self.overwrites(mine, place)
                    mine.view(-1)[place] = value
                else:
                    state[name] = value
        touched = sorted((first, last) for first, last in bounds if first < last)  # groups need not follow the layout
        return torch.cat([offsets[first:last] for first, last in touched]).to(offset_dtype(self._span.length))

    def _advance_schedule(self, steps: int) -> None:
        """Step the scheduler, if any; one that is at its end (``OneCycleLR``) leaves the rate where it is."""
        if self._scheduler is None or self._optimizer is None:
            return
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


def _tensors_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _like(value: object, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape


def reshard(pieces: Sequence[PieceState], span: Span, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the state of a tensor's piece, put together from the pieces of all shards that overlap it.

    A piece with the same borders keeps everything as it is. Of others, values by entry are cut; a counter of steps is
    that of the furthest, because shards need not have applied the same pushes.
    """
    found = sorted((p for p in pieces if p.span.intersect(span).length), key=lambda piece: piece.span.start)
    if len(found) == 1 and found[0].span == span:
        return dict(found[0].state)
    furthest = max((piece.state for piece in found), key=lambda state: float(state.get("step", 0)), default={})
    state: dict[str, Any] = {}
    for name in dict.fromkeys(name for piece in found for name in piece.state):
        values = [(piece, piece.state[name]) for piece in found if name in piece.state]
        if all(isinstance(v, torch.Tensor) and v.dim() and tuple(v.shape) == piece.shape for piece, v in values):
            whole = torch.zeros(span.length, dtype=values[0][1].dtype, device="cpu")
            for piece, value in values:
                part = piece.span.intersect(span)
                entries = slice(part.start - piece.span.start, part.end - piece.span.start)
                whole[part.start - span.start : part.end - span.start] = value.reshape(-1)[entries]
            state[name] = whole.reshape(shape)
        else:
            state[name] = furthest.get(name, values[0][1])
    return state
