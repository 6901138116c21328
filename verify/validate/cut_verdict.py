"""What became of the pushes of a server whose power is cut again and again."""

from dataclasses import dataclass

from verify.validate.noted import Noted


@dataclass(slots=True)
class CutVerdict(Noted):
    """What became of the pushes.

    Attributes:
        cuts: of the power.
        sent: pushes that a worker was about to send at least.
        acknowledged: of these, answered.
        repeated: answers to pushes that were applied before, all by the version that they have.
        gone: acknowledged, and not there behind a cut, as the mode allows.
        gone_seconds: the longest time from an answer to the cut that took its push.
        lost: acknowledged or seen, and not there although the mode promises it.
        duplicated: applied twice, or nobody's.
        compared: models that were compared at the version that they claimed.
        different: of these, not equal bit for bit to the replay of the pushes that they claim.
        checkpoints: that operators were told of.
        checkpoints_lost: of these, not there behind a cut, or with other values.
        histories: that a server has begun.
        refused: starts that named what is damaged, and went on with ``--recover last-good``.
    """

    cuts: int = 0
    sent: int = 0
    acknowledged: int = 0
    repeated: int = 0
    gone: int = 0
    gone_seconds: float = 0.0
    lost: int = 0
    duplicated: int = 0
    compared: int = 0
    different: int = 0
    checkpoints: int = 0
    checkpoints_lost: int = 0
    histories: int = 0
    refused: int = 0

    @property
    def kept(self) -> bool:
        """Whether every promise was kept so far."""
        return not self.lost + self.duplicated + self.different + self.checkpoints_lost and not self.notes

    @property
    def good(self) -> bool:
        """Whether every promise was kept, and was put to the test."""
        return self.kept and min(self.cuts, self.acknowledged, self.compared) > 0
