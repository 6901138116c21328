"""What parameters were at recent versions, where they have changed since: for DC-ASGD (Zheng et al., ICML 2017).

Each version's record is what it overwrote, so that the value at an older version is that of the earliest record after
it, or the value now where there is none.
"""

from collections import deque
from typing import NamedTuple

import torch

from psservice.model.changelog import ChangedIndices
from psservice.model.update.base import RuleState

_MOST_VERSIONS = 10_000  # a bound on what empty pushes may cost, and on the time to look through them


class Overwritten(NamedTuple):
    """The values that a version has replaced: fp32, at its support (``None``: everywhere)."""

    version: int
    support: ChangedIndices
    values: torch.Tensor


class PastValues:
    """The overwritten values of recent versions, oldest forgotten first.

    Args:
        entry_limit: values kept.
    """

    def __init__(self, entry_limit: int) -> None:
        """Remember nothing yet."""
        self._entry_limit = entry_limit
        self._records: deque[Overwritten] = deque()
        self._entries = 0

    def note(self, record: Overwritten) -> None:
        """Remember what a version has overwritten; versions come in order."""
        self._records.append(record)
        self._entries += record.values.numel()
        while self._entries > self._entry_limit or len(self._records) > _MOST_VERSIONS:
            self._entries -= self._records.popleft().values.numel()

    def at(self, theta: torch.Tensor, version: int, now: int, offsets: torch.Tensor | None) -> torch.Tensor | None:
        """Return the values at an older version; ``None`` where that is forgotten.

        Args:
            theta: the values now, fp32 ``[n]``.
            version: the older one.
            now: the version of ``theta``.
            offsets: where, strictly increasing; ``None`` for everywhere.
        """
        later = [record for record in self._records if record.version > version]
        if len(later) < now - version:
            return None
        found = theta.clone() if offsets is None else theta[offsets]
        for record in reversed(later):
            if record.support is None:
                found = record.values.clone() if offsets is None else record.values[offsets]
            elif offsets is None:
                found[record.support.to(found.device).long()] = record.values
            elif record.support.numel() and offsets.numel():
                support = record.support.to(offsets.device).long()
                place = torch.searchsorted(support, offsets).clamp_(max=support.numel() - 1)
                hit = support[place] == offsets
                found[hit] = record.values[place[hit]]
        return found

    def export(self) -> RuleState:
        """Copy everything that is remembered."""
        versions = [record.version for record in self._records]
        tensors = {f"{record.version}.values": record.values.clone() for record in self._records}
        tensors |= {f"{r.version}.support": r.support.clone() for r in self._records if r.support is not None}
        return RuleState({"versions": versions}, tensors)

    def restore(self, state: RuleState, device: torch.device) -> None:
        """Take over what :meth:`export` returned."""
        for version in state.plain.get("versions", ()):
            values = state.tensors[f"{version}.values"].to(device)
            self.note(Overwritten(int(version), state.tensors.get(f"{version}.support"), values))


def compensated(
    push: torch.Tensor, now: torch.Tensor, base: torch.Tensor, strength: float, learning_rate: float
) -> torch.Tensor:
    """Return ``p + (λ/lr)·p⊙p⊙(θ_now − θ_base)``: equation 5 of the paper for a push that carries its learning rate.

    Args:
        push: ``p``, the sent values.
        now: ``θ_now`` at the same entries.
        base: ``θ_base``, what the gradient was taken at.
        strength: ``λ``.
        learning_rate: ``lr``, above 0.

    Returns:
        The compensated values; where one would not be finite, the push as it came.
    """
    better = push + (strength / learning_rate) * push * push * (now - base)
    return better if bool(better.isfinite().all()) else push
