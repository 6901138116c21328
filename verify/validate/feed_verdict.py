"""What became of the publications of a feed."""

from dataclasses import dataclass

from verify.validate.noted import Noted


@dataclass(slots=True)
class FeedVerdict(Noted):
    """What became of the publications of a feed.

    Attributes:
        begun: models that a publisher was about to publish.
        acknowledged: versions that a publisher was told of.
        in_doubt: models that were begun and of which nobody was told.
        versions: that were checked: a version counts once a history.
        claims: models that followers held, with the version that they claimed.
        looks: fresh reads of all shards.
        downloads: models that psclient has downloaded whole.
        restores: that took the feed back.
        nobodys: claims, looks and downloads of a model that was not published as a whole: a mixture, or one too early.
        mixed: claims of shards at several versions.
        renamed: versions of one history that had two models.
        lost: acknowledged versions that a later look did not have, without a restore that was asked for.
        went_back: claims of an older version than the same follower held before.
        late: followers that did not reach the last version.
    """

    begun: int = 0
    acknowledged: int = 0
    in_doubt: int = 0
    versions: int = 0
    claims: int = 0
    looks: int = 0
    downloads: int = 0
    restores: int = 0
    nobodys: int = 0
    mixed: int = 0
    renamed: int = 0
    lost: int = 0
    went_back: int = 0
    late: int = 0

    @property
    def good(self) -> bool:
        """Whether every promise was kept, and was put to the test."""
        bad = self.nobodys + self.mixed + self.renamed + self.lost + self.went_back + self.late
        return not bad and not self.notes and min(self.acknowledged, self.versions, self.claims, self.looks) > 0
