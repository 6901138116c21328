"""The faults of a verdict, in words."""

from dataclasses import dataclass, field

_MOST_NOTES = 20


@dataclass(slots=True)
class Noted:
    """A verdict with notes.

    Attributes:
        notes: each a fault, in words; the first of many.
    """

    notes: list[str] = field(default_factory=list, kw_only=True)

    def say(self, fault: str) -> None:
        """Note a fault; the first of many are enough."""
        if len(self.notes) < _MOST_NOTES:
            self.notes.append(fault)
