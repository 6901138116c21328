"""The gradients of a step: collected, refused if one is not finite, with the addresses by which loops read them."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import repeat
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray

from psclient.compress.groups import ParamGroups
from psclient.errors import ModelChangedError, NonFiniteGradientError
from psclient.model.module import TrainedModel, edits_of
from pscore.selection.host.segments import KINDS, first_not_finite
from pscore.selection.rule import Integers

Scale = float | torch.Tensor
"""A factor for all gradients of a step. A tensor, of no dimension, is on their device, and nobody waits for it."""

_dtype, _is_cpu = attrgetter("dtype"), attrgetter("is_cpu")


class Gradients(dict[int, torch.Tensor]):
    """Gradients by position in the layout, ascending, each attribute of all of them read once.

    Attributes:
        positions: int64 ``[m]``.
        sizes: int64 ``[m]``, elements.
        addresses: int64 ``[m]``; 0 if no loop can read the tensor: not contiguous, another dtype, negated by torch's
            mark only.
        on_host: bool ``[m]``.
        kinds: int8 ``[m]``, as in :data:`~pscore.selection.host.segments.KINDS`; -1 for another dtype.
        rows: by position, int64 ``[t]``, ascending: which rows of the parameter a gradient ``[t, …]`` has, as that of
            ``nn.Embedding(sparse=True)``. It is zero in all others. A position that is missing has them all.
        unsound: int32 on a device, not 0 if some norm is not finite; ``None`` if all gradients are known to be.
    """

    positions: Integers
    sizes: Integers
    addresses: Integers
    kinds: NDArray[np.int8]
    on_host: NDArray[np.bool_]
    unsound: torch.Tensor | None = None

    def __init__(self, tensors: Mapping[int, torch.Tensor], rows: Mapping[int, Integers] | None = None) -> None:
        super().__init__(tensors)
        self.rows = dict(rows or {})
        count, used = len(self), self.values()
        self.positions = np.fromiter(self, np.int64, count)
        self.sizes = np.fromiter(map(torch.Tensor.numel, used), np.int64, count)
        self.kinds = np.fromiter(map(KINDS.get, map(_dtype, used), repeat(-1)), np.int8, count)
        is_plain = np.fromiter(map(torch.Tensor.is_contiguous, used), bool, count)
        self.on_host = np.fromiter(map(_is_cpu, used), bool, count)
        is_plain &= (self.kinds >= 0) & ~np.fromiter(map(torch.Tensor.is_neg, used), bool, count)
        if is_plain.all():
            self.addresses = np.fromiter(map(torch.Tensor.data_ptr, used), np.int64, count)
        else:
            self.addresses = np.zeros(count, np.int64)
            listed = list(used)
            plain = np.flatnonzero(is_plain)
            self.addresses[plain] = [listed[place].data_ptr() for place in plain.tolist()]


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
    """Return the gradients (by position, ascending) as their memory has them: dense, or of some rows.

    With ``waits=False`` the check stays on the device: the result is flagged in ``unsound``; call
    :func:`refuse_unsound` if it is set.

    Raises:
        NonFiniteGradientError: one is not finite; the first such parameter is named.
        ModelChangedError: one has another number of elements than its parameter had, or its memory is freed.
    """
    found = Gradients(gradients)
    wrong = found.positions[found.sizes != model.sizes[found.positions]].tolist()
    if wrong:
        raise ModelChangedError(
            model.layout.parameters[wrong[0]].name,
            f"has a gradient of {found[wrong[0]].numel()} elements, and {model.sizes[wrong[0]]} of its own",
            "leave the size of a gradient alone, or set it to None",
        )
    rows = {}
    odd: dict[int, torch.Tensor] = {}
    for n in found.positions[found.addresses == 0].tolist():
        if _has_rows(found[n]):
            odd[n], rows[n] = _touched_rows(model.layout.parameters[n].name, found[n])
        else:
            odd[n] = _in_memory(found[n])
    if any(found[n] is not tensor for n, tensor in odd.items()):
        found = Gradients({**gradients, **odd}, rows)
    for n, tensor in odd.items():
        if tensor.is_cpu and tensor.numel() and not tensor.data_ptr():
            name, why = model.layout.parameters[n].name, "has a gradient whose memory is freed"
            raise ModelChangedError(name, why, "call step() before it is, or set it to None")
    if not waits and not rows and (found.addresses != 0).all():
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


def _has_rows(gradient: torch.Tensor) -> bool:
    """Tell whether a gradient names the rows that it has, and the others are zero."""
    return gradient.layout is torch.sparse_coo and gradient.sparse_dim() == 1


def _touched_rows(name: str, gradient: torch.Tensor) -> tuple[torch.Tensor, Integers]:
    """Return the values ``[t, …]`` of a gradient that names its rows, and these, ascending; equal ones are summed."""
    whole = gradient.coalesce()
    rows = whole.indices()[0].cpu().numpy()
    if rows.size and not 0 <= rows[0] <= rows[-1] < gradient.shape[0]:
        raise ModelChangedError(
            name,
            f"has a sparse gradient with row {rows[0] if rows[0] < 0 else rows[-1]} of {gradient.shape[0]}",
            "make it with torch.sparse_coo_tensor(…, check_invariants=True) to find out where",
        )
    return _in_memory(whole.values().detach().contiguous()), rows


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


def norms(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norms of gradients in another order, fp32 ``[m]`` on one of their devices; nothing waits."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    found = [torch.stack(torch._foreach_norm(same, 2, torch.float32)) for same in alike.values()]
    if not found:
        return torch.zeros(0, dtype=torch.float32, device="cpu")
    return torch.cat([each.to(found[0].device, non_blocking=True) for each in found])
