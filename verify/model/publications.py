"""The judge of a feed: everything that anybody has seen of it is one model that was published as a whole.

It knows the models from the publishers' recipes alone (:mod:`verify.model.words`), and asks the books what was begun
and acknowledged when.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from verify.model import words
from verify.traffic.notes import Claim
from verify.traffic.publications import Publication
from verify.validate.feed_verdict import FeedVerdict

Name = tuple[int, int]
"""Of a version: the generation of shard 0, which names the history, and the number."""


class Part(NamedTuple):
    """What a fresh read of one shard has: ``octets`` from octet ``start`` of the model on."""

    generation: int
    version: int
    start: int
    octets: words.Octets


@dataclass(frozen=True, slots=True)
class Look:
    """Fresh reads of all shards, in order, between two moments of the system's monotonic clock."""

    begun: float
    ended: float
    parts: tuple[Part, ...]


class Download(NamedTuple):
    """A model that somebody has downloaded without a lease: until when, and its digest."""

    ended: float
    digest: str


@dataclass(slots=True)
class Restore:
    """A rollback that an operator has asked for.

    Attributes:
        asked: when.
        is_by_version: whether a version was named, and not a checkpoint, which may be of an older history.
        ended: when the command ended; until then, and for ever if it never did, it may take effect.
        from_generation: of shard 0 before it.
        version: to which it went back; ``None`` if it was refused or failed, or if that is not known.
        generation: of shard 0 behind it, likewise.
    """

    asked: float
    from_generation: int
    is_by_version: bool
    ended: float = float("inf")
    version: int | None = None
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class Follower:
    """What one follower has claimed.

    Attributes:
        name: in words.
        lives: the claims of each life, in order.
        is_kept: whether a life goes on from what the one before has left, as with a directory.
        allows_older: whether it follows a feed that goes back.
    """

    name: str
    lives: tuple[tuple[Claim, ...], ...]
    is_kept: bool = False
    allows_older: bool = False

    @property
    def last(self) -> Claim | None:
        """What the last life held last."""
        return self.lives[-1][-1] if self.lives and self.lives[-1] else None


@dataclass(frozen=True, slots=True)
class Story:
    """Everything that was written down of a feed."""

    layout: str
    publications: Mapping[str, Publication]
    followers: Sequence[Follower]
    looks: Sequence[Look]
    downloads: Sequence[Download]
    restores: Sequence[Restore]


def judge(story: Story) -> FeedVerdict:
    """Judge a feed."""
    return _Trial(story).verdict


class _Trial:
    def __init__(self, story: Story) -> None:
        self._story, self.verdict = story, FeedVerdict()
        recipes = {name: each.recipe for name, each in story.publications.items()}
        self._models = words.Models(story.layout, recipes)
        self._begun: dict[str, float] = {}  # by the model's digest: the earliest
        self._known: dict[Name, set[str]] = defaultdict(set)
        self._count()
        self._know_acknowledged()
        for follower in story.followers:
            self._check_claims(follower)
        for look in story.looks:
            self._check_look(look)
            self._check_lost(look)
        for download in story.downloads:
            if not self._is_published(download.digest, download.ended):
                self.verdict.nobodys += 1
                self.verdict.say("a download is a model that nobody has published")
        self._check_restores()
        self._check_names()
        self._check_end()

    def _count(self) -> None:
        verdict, story = self.verdict, self._story
        verdict.begun = len(story.publications)
        verdict.acknowledged = sum(len(each.told) for each in story.publications.values())
        verdict.in_doubt = sum(not each.told for each in story.publications.values())
        verdict.looks, verdict.downloads = len(story.looks), len(story.downloads)
        verdict.claims = sum(len(claims) for follower in story.followers for claims in follower.lives)
        verdict.restores = sum(restore.version is not None for restore in story.restores)
        for each in story.publications.values():
            if words.digest(self._models[each.name]) != each.digest:
                verdict.say(f"{each.name} was handed over as another model than its recipe makes")
            self._begun[each.digest] = min(each.begun, self._begun.get(each.digest, float("inf")))

    def _know_acknowledged(self) -> None:
        for each in self._story.publications.values():
            for told in each.told:
                self._known[told.generation, told.version].add(each.digest)

    # What was seen is one model that was published

    def _is_published(self, digest: str, until: float) -> bool:
        return self._begun.get(digest, float("inf")) <= until

    def _check_claims(self, follower: Follower) -> None:
        newest = dict[int, int]()  # by generation; under 0 if that makes no difference
        for claims in follower.lives:
            if not follower.is_kept:
                newest.clear()
            for claim in claims:
                self._check_claim(follower.name, claim)
                generation, version = claim.shards[0]
                history = generation if follower.allows_older else 0
                before = newest.get(history, version)
                if version < before:
                    self.verdict.went_back += 1
                    self.verdict.say(f"{follower.name} went back from version {before} to {version}")
                newest[history] = max(before, version)

    def _check_claim(self, name: str, claim: Claim) -> None:
        generation, version = claim.shards[0]
        versions = [each[1] for each in claim.shards]
        if len({*versions}) != 1:
            self.verdict.mixed += 1
            self.verdict.say(f"{name} claims versions {versions}")
        if not self._is_published(claim.digest, claim.at):
            self.verdict.nobodys += 1
            self.verdict.say(f"{name} holds a model at version {version} that nobody has published")
        self._known[generation, version].add(claim.digest)

    def _check_look(self, look: Look) -> None:
        versions = {part.version for part in look.parts}
        if len(versions) == 1:
            whole = words.digest(np.concatenate([part.octets for part in look.parts]))
            self._known[look.parts[0].generation, look.parts[0].version].add(whole)
            if not self._is_published(whole, look.ended):
                self.verdict.nobodys += 1
                self.verdict.say(f"the shards have a model at version {versions.pop()} that nobody has published")
            return
        for index, part in enumerate(look.parts):
            if not any(words.digest(octets) == words.digest(part.octets) for octets in self._parts_like(part, look)):
                self.verdict.nobodys += 1
                self.verdict.say(f"shard {index} has words at version {part.version} that nobody has published")

    def _parts_like(self, part: Part, look: Look) -> Iterator[words.Octets]:
        for each in self._story.publications.values():
            if each.begun <= look.ended:
                yield self._models[each.name][part.start : part.start + part.octets.size]

    # What was acknowledged stays

    def _check_lost(self, look: Look) -> None:
        now = look.parts[0]
        for each in self._story.publications.values():
            for told in each.told:
                if told.at > look.begun:
                    continue
                is_kept = now.generation == told.generation and now.version >= told.version
                is_same = now.generation == told.generation
                if not is_kept and (is_same or not self._is_taken_back(each.begun, look.ended)):
                    self.verdict.lost += 1
                    self.verdict.say(
                        f"version {told.version} of generation {told.generation:x} was acknowledged, and shard 0 has "
                        f"version {now.version} of generation {now.generation:x}"
                    )

    def _is_taken_back(self, begun: float, ended: float) -> bool:
        """Tell whether a restore may have taken effect between two moments."""
        return any(restore.ended >= begun and restore.asked <= ended for restore in self._story.restores)

    def _check_restores(self) -> None:
        """A restore to a version gives the model that it had in the history before, if that had one."""
        for restore in self._story.restores:
            if restore.version is None or restore.generation is None or not restore.is_by_version:
                continue
            before = self._known.get((restore.from_generation, restore.version), set())
            behind = self._known.get((restore.generation, restore.version), set())
            if before and behind - before:
                self.verdict.renamed += 1
                self.verdict.say(f"a restore to version {restore.version} has brought another model than that had")

    def _check_names(self) -> None:
        self.verdict.versions = len(self._known)
        for (generation, version), digests in self._known.items():
            if len(digests) > 1:
                self.verdict.renamed += 1
                self.verdict.say(f"version {version} of generation {generation:x} is {len(digests)} models")

    # The end

    def _check_end(self) -> None:
        acknowledged = [(told.at, each, told) for each in self._story.publications.values() for told in each.told]
        if not acknowledged:
            return
        _, newest, told = max(acknowledged, key=lambda one: one[0])
        wanted = told.version, newest.digest
        for follower in self._story.followers:
            last = follower.last
            if last is None or (last.shards[0][1], last.digest) != wanted:
                self.verdict.late += 1
                held = "nothing" if last is None else f"version {last.shards[0][1]}"
                self.verdict.say(f"{follower.name} holds {held} at the end, the feed has version {told.version}")
        if self._story.looks:
            last_look = max(self._story.looks, key=lambda look: look.ended)
            whole = words.digest(np.concatenate([part.octets for part in last_look.parts]))
            if ({part.version for part in last_look.parts}, whole) != ({told.version}, newest.digest):
                self.verdict.lost += 1
                self.verdict.say(f"the shards do not have version {told.version}, which was published last")
