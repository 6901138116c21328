"""A shard of a feed: the words of the version that is published, and those of the next one, staged."""

import hashlib
from collections.abc import Collection
from dataclasses import replace

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.telemetry.tracing import traced
from pscore.wire.generation import epoch
from psservice.model.parameters import ModelPart, ModelShard
from psservice.rules.base import PLAIN, PushContext, RuleState

_NAME_DIGITS = 24
_MOST_NAMES = 64


class Staged:
    """The publication that is staged for the next version.

    Attributes:
        version: that it will be; 0 if nothing is staged.
        name: of the push that has staged it.
        published: the version that was published last, and the name of the push that had staged it; read as one.
        words: over the shard's span; ``None`` if the publication changes nothing here.
    """

    def __init__(self, span: Span) -> None:
        self._span = span
        self.version, self.name, self.published = 0, "", (0, "")
        self.words: SparseSlice | None = None

    def clear(self) -> None:
        """Stage nothing."""
        self.version, self.name, self.words = 0, "", None

    def export(self) -> RuleState:
        """Return the staged publication: the tensors themselves, which do not change."""
        words = self.words
        tensors = {} if words is None else {"words": words.values}
        if words is not None and words.offsets is not None:
            tensors["offsets"] = words.offsets
        return RuleState({"version": self.version, "name": self.name, "published": [*self.published]}, tensors)

    def restore(self, state: RuleState) -> None:
        """Restore a staged publication; raises ``ValueError`` or ``KeyError`` if the state does not fit."""
        plain, words = state.plain, state.tensors.get("words")
        self.version, self.name = int(plain["version"]), str(plain["name"])
        self.published = int(plain["published"][0]), str(plain["published"][1])
        self.words = None if words is None else SparseSlice(self._span, state.tensors.get("offsets"), words)


class FeedShard(ModelShard):
    """Words that change when a version is published.

    Attributes:
        staged: the next version.
        lacks: the version that shard 0 has published, and that was never staged here; 0 if there is none.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.staged, self.lacks = Staged(self.span), 0
        self.staged.published = self.version, ""
        self._names: dict[int, str] = {}  # of the pushes that had staged the last versions

    @property
    def publication(self) -> str:
        """The publication that the words are."""
        return self.publication_at(self.version)

    def publication_at(self, version: int) -> str:
        """Return the publication that a version of this history is; empty if that is not known."""
        last = self.staged.published
        name = last[1] if last[0] == version else self._names.get(version)
        return "" if name is None else self._named(version, name)

    def bring_to(self, publication: str) -> bool:
        """Tell whether the words are a publication; one that is staged, and shard 0 has published, they become."""
        if self.staged.version and self._named(self.staged.version, self.staged.name) == publication:
            self.publish()
        return self.publication == publication

    def _named(self, version: int, name: str) -> str:
        return f"{epoch(self.generation)}-{version}-{hashlib.sha256(name.encode()).hexdigest()[:_NAME_DIGITS]}"

    def version_after(self, base_version: int) -> int:
        """Return the version that a publication will be: the one behind its base."""
        return base_version + 1

    @traced("apply")
    def take(self, worker: str, push: SparseSlice | None, context: PushContext = PLAIN, step: int = 0) -> int:
        """Stage a publication in the place of another one; return the version that it will be, behind its base."""
        version = self.version_after(self.version if context.base_version is None else context.base_version)
        self.staged.version, self.staged.name = version, context.name
        self.staged.words = None if push is None else _copied(push)
        return version

    def publish(self) -> int:
        """Make the staged publication the feed's version, and return that; raises ``ValueError`` if there is none."""
        if not self.staged.version:
            raise ValueError("nothing is staged")
        self._names[self.staged.version] = self.staged.name  # first: others look it up for the version that they see
        self._names.pop(min(self._names) if len(self._names) > _MOST_NAMES else -1, None)
        version = self.apply(self.staged.words, version=self.staged.version)  # shards that lack versions catch up
        self.staged.published = version, self.staged.name
        self.staged.clear()
        return version

    def begin_rounds_anew(self, dropped: Collection[str]) -> None:
        """Drop the staged publication: the history that it belongs to has ended."""
        self.staged.clear()

    def _parts(self) -> dict[str, ModelPart]:
        return {**super()._parts(), "staged": self.staged}


def _copied(push: SparseSlice) -> SparseSlice:
    """Return a push in memory of its own: a message may own the push's."""
    offsets = None if push.offsets is None else push.offsets.clone()
    return replace(push, offsets=offsets, values=push.values.clone())
