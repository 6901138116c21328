"""Values that recent versions have overwritten: for DC-ASGD (Zheng et al., ICML 2017).

The value at an older version is that of the earliest record after it, or the value now if there is none.
"""

from collections import deque
from typing import NamedTuple

import torch

from psservice.rules.base import RuleState
from psservice.rules.changed import ChangedIndices

_MOST_VERSIONS = 10_000  # a bound on what empty pushes may cost, and on the time to search them


class Overwritten(NamedTuple):
    """The fp32 values that a version has replaced at the indices that it changed."""

    version: int
    changed: ChangedIndices
    values: torch.Tensor


class UndoLog:
    """The overwritten values of recent versions, at most ``entry_limit`` of them, oldest dropped first."""

    def __init__(self, entry_limit: int) -> None:
        self._entry_limit = entry_limit
        self._records: deque[Overwritten] = deque()
        self._entries = 0

    def append(self, record: Overwritten) -> None:
        """Record what a version has overwritten; versions come in order."""
        self._records.append(record)
        self._entries += record.values.numel()
        while self._entries > self._entry_limit or len(self._records) > _MOST_VERSIONS:
            self._entries -= self._records.popleft().values.numel()

    def at(self, theta: torch.Tensor, version: int, now: int, offsets: torch.Tensor | None) -> torch.Tensor | None:
        """Return the values at an older version and these offsets; ``None`` if records of it are dropped."""
        later = [record for record in self._records if record.version > version]
        if len(later) < now - version:
            return None
        found = theta.clone() if offsets is None else theta[offsets]
        for record in reversed(later):
            if record.changed is None:
                found = record.values.clone() if offsets is None else record.values[offsets]
            elif offsets is None:
                found[record.changed.to(found.device).long()] = record.values
            elif record.changed.numel() and offsets.numel():
                changed = record.changed.to(offsets.device).long()
                place = torch.searchsorted(changed, offsets).clamp_(max=changed.numel() - 1)
                # Not by a mask, whose entries a device would have to count first.
                found = torch.where(changed[place] == offsets, record.values[place], found)
        return found

    def export(self) -> RuleState:
        """Return every record; nothing changes what records have."""
        tensors = {f"{record.version}.values": record.values for record in self._records}
        tensors |= {f"{r.version}.support": r.changed for r in self._records if r.changed is not None}
        return RuleState({"versions": [record.version for record in self._records]}, tensors)

    def restore(self, state: RuleState) -> None:
        """Append the records of :meth:`export`."""
        for version in state.plain.get("versions", ()):
            changed = state.tensors.get(f"{version}.support")
            self.append(Overwritten(int(version), changed, state.tensors[f"{version}.values"]))
