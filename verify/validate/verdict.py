"""What became of the pushes and the replicas of one shard."""

from dataclasses import dataclass

from verify.validate.noted import Noted


@dataclass(slots=True)
class Verdict(Noted):
    """What became of the pushes of one shard.

    Attributes:
        sent: pushes that a worker was about to send at least.
        acknowledged: of these, answered.
        applied: the server's version.
        repeated: answers to pushes that were answered before: all must say the same.
        refused: answers that say no.
        in_doubt: sent and never answered.
        lost: acknowledged, and not in the server's model.
        duplicated: applied and nobody's, or answered with more than one version.
        disordered: answered with a version below that of an earlier step of the same life, or a wrong staleness.
        compared: models and replicas that were compared at the version they claimed.
        different: of these, not equal to the reference bit for bit.
        wrong_bits: elements of the last model that differ.
        whole_replies: exact replies of every element.
        topk_replies: top-k replies whose entries, and whose replica, were compared.
    """

    sent: int = 0
    acknowledged: int = 0
    applied: int = 0
    repeated: int = 0
    refused: int = 0
    in_doubt: int = 0
    lost: int = 0
    duplicated: int = 0
    disordered: int = 0
    compared: int = 0
    different: int = 0
    wrong_bits: int = 0
    whole_replies: int = 0
    topk_replies: int = 0

    @property
    def bit_identical(self) -> bool:
        """Whether every comparison, the last model's first of all, found the same bits."""
        return not self.wrong_bits and not self.different

    @property
    def good(self) -> bool:
        """Whether every promise was kept."""
        bad = self.refused + self.in_doubt + self.lost + self.duplicated + self.disordered
        return not bad and self.bit_identical and self.sent == self.acknowledged == self.applied
