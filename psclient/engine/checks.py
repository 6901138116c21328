"""Collecting gradients, and refusing them if one is not finite, or if other workers push the same."""

import gc
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from psclient.compress.gradients import Gradients, norms
from psclient.compress.groups import ParamGroups
from psclient.errors import ConfigurationError, ModelChangedError, NonFiniteGradientError
from psclient.model.module import TrainedModel, edits_of
from pscore.selection.host.segments import first_not_finite


def gather(model: TrainedModel, groups: ParamGroups, positions: range) -> dict[int, torch.Tensor]:
    """Return the gradients of the trained parameters at these positions, as they are, ascending; costs nothing."""
    trained, parameters = groups.trained(model.parameters), model.parameters
    inside = trained[bisect_left(trained, positions.start) : bisect_left(trained, positions.stop)]
    return {n: g for n in inside if (g := parameters[n].grad) is not None}


def require_trainable(model: TrainedModel, groups: ParamGroups) -> None:
    """Raise :class:`ModelChangedError` if every parameter of the optimizer was frozen, so that steps train nothing."""
    trained = groups.trained(model.parameters)
    if trained and not any(model.parameters[position].requires_grad for position in trained):
        raise ModelChangedError(
            model.layout.parameters[trained[0]].name,
            "needs no gradient any more, nor does any other parameter of this optimizer: its steps train nothing",
            "freeze a model, or wrap it, before its optimizer is made (peft: call get_peft_model() yourself first), or "
            "set requires_grad again",
        )


def finite(model: TrainedModel, gradients: Mapping[int, torch.Tensor], *, waits: bool = True) -> Gradients:
    """Return the gradients (by position, ascending) dense, as their memory has them.

    With ``waits=False`` the check stays on the device: the result is flagged in ``unsound``; call
    :func:`refuse_unsound` if it is set.

    Raises:
        NonFiniteGradientError: one is not finite; the first such parameter is named.
        ModelChangedError: one has another number of elements than its parameter had, or its memory is freed.
    """
    found = Gradients(gradients)
    odd = {n: _in_memory(found[n]) for n in found.positions[found.addresses == 0].tolist()}
    if any(found[n] is not tensor for n, tensor in odd.items()):
        found = Gradients({**gradients, **odd})
    for n, tensor in odd.items():
        if tensor.is_cpu and tensor.numel() and not tensor.data_ptr():
            name, why = model.layout.parameters[n].name, "has a gradient whose memory is freed"
            raise ModelChangedError(name, why, "call step() before it is, or set it to None")
    wrong = found.positions[found.sizes != model.sizes[found.positions]].tolist()
    if wrong:
        raise ModelChangedError(
            model.layout.parameters[wrong[0]].name,
            f"has a gradient of {found[wrong[0]].numel()} elements, and {model.sizes[wrong[0]]} of its own",
            "leave the size of a gradient alone, or set it to None",
        )
    if not waits and (found.addresses != 0).all():
        found.unsound = (~norms(found.values()).isfinite().all()).int()
        return found
    is_plain = (found.addresses != 0) & found.on_host
    row = first_not_finite(*(column[is_plain] for column in (found.addresses, found.kinds, found.sizes)))
    others = found.positions[~is_plain].tolist()
    bad = [] if row is None else [int(found.positions[is_plain][row])]
    bad += _first_of_any({n: found[n] for n in others})
    if bad:
        raise NonFiniteGradientError(model.layout.parameters[min(bad)].name)
    return found


def refuse_unsound(model: TrainedModel, gradients: Gradients) -> None:
    """Raise :class:`NonFiniteGradientError`, unless each element is finite and only a norm has overflowed."""
    gradients.unsound = None
    if bad := _first_of_any(gradients):
        raise NonFiniteGradientError(model.layout.parameters[bad[0]].name)


def _in_memory(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient dense, negated if torch has only noted that, and zeros if it has noted those."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().to_dense()
    if gradient._is_zerotensor():
        gradient = gradient + torch.zeros((), dtype=gradient.dtype, device=gradient.device)
    return gradient.resolve_neg()


def _first_of_any(gradients: Mapping[int, torch.Tensor]) -> list[int]:
    """Return the position of the first one that is not finite, if there is one; on any device."""
    # The norms are the fast test; one may overflow although every element is finite, so only elements convict.
    if gradients and not bool(norms(gradients.values()).isfinite().all()):
        return [n for n, gradient in gradients.items() if not bool(gradient.isfinite().all())][:1]
    return []


def refuse_averaged(parameters: Iterable[torch.Tensor], among: Iterable[Any] | None = None) -> None:
    """Raise :class:`ConfigurationError` if ``DistributedDataParallel`` averages the gradients of these parameters.

    Without modules to search (``among``) all live objects are searched, which is slow: such a module leaves no mark on
    its parameters.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    from torch.nn.parallel import DistributedDataParallel

    ours = {id(parameter) for parameter in parameters}
    if among is None:
        gc.collect()  # a module without a reference averages nothing
        among = gc.get_objects()
    for module in among:
        if not issubclass(type(module), DistributedDataParallel):  # some objects answer isinstance() with an error
            continue
        ranks = dist.get_world_size(module.process_group)
        if ranks > 1 and any(id(parameter) in ours for parameter in module.parameters()):
            raise ConfigurationError(
                f"DistributedDataParallel averages these gradients over {ranks} processes, and each of them would push "
                f"the average: the model would move {ranks} times as far. Make one worker of these processes with "
                "psclient.NodeOptimizer (docs/guide/nodes.md), or leave DistributedDataParallel out"
            )


class PushedGradients:
    """The gradients of a step that was pushed and has not ended: the step, called again, must not push them again."""

    def __init__(self) -> None:
        self._pushed: dict[int, torch.Tensor] = {}
        self._versions: list[int] = []

    def note(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Remember the gradients of a push."""
        self._pushed, self._versions = dict(gradients), edits_of(gradients.values())

    def clear(self) -> None:
        """Forget them: the step has ended."""
        self._pushed = {}

    def matches(self, gradients: Mapping[int, torch.Tensor]) -> bool:
        """Return whether these are the very same, unchanged: no backward pass has run since."""
        if not self._pushed or self._pushed.keys() != gradients.keys():
            return False
        pairs = ((gradients[position], gradient) for position, gradient in self._pushed.items())
        return all(now is before for now, before in pairs) and edits_of(self._pushed.values()) == self._versions
