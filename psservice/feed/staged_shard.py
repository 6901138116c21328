"""A shard whose next version is staged, and published later: that of a feed, or of a relay."""

from dataclasses import replace

import numpy as np
import torch

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from psservice.model.parameters import ModelPart, ModelShard
from psservice.rules.base import RuleState

_MOST_NAMES = 64


class Staged:
    """The next version of a shard, staged.

    Attributes:
        version: that it will be; 0 if nothing is staged, or if it is a relay's version 0, which has a name.
        name: of the push, or of the source's cut, that has staged it.
        published: the version that was published last, and the name under which it was staged; read as one.
        words: over the shard's span; ``None`` if nothing changes here.
        buffers: all buffers that come with it, packed; empty if they do not change.
    """

    def __init__(self, span: Span) -> None:
        self._span = span
        self.version, self.name, self.published = 0, "", (0, "")
        self.words: SparseSlice | None = None
        self.buffers = b""

    @property
    def is_there(self) -> bool:
        """Whether something is staged."""
        return bool(self.version or self.name)

    def stage(self, version: int, name: str, words: SparseSlice | None, buffers: bytes = b"") -> None:
        """Stage a version in the place of another one; the words are copied, because a message may own their memory."""
        self.version, self.name, self.buffers = version, name, buffers
        self.words = None if words is None else _copied(words)

    def clear(self) -> None:
        """Stage nothing."""
        self.version, self.name, self.words, self.buffers = 0, "", None, b""

    def export(self) -> RuleState:
        """Return the staged version: the tensors themselves, which do not change."""
        words = self.words
        tensors = {} if words is None else {"words": words.values}
        if words is not None and words.offsets is not None:
            tensors["offsets"] = words.offsets
        if self.buffers:
            tensors["buffers"] = torch.from_numpy(np.frombuffer(self.buffers, np.uint8).copy())
        return RuleState({"version": self.version, "name": self.name, "published": [*self.published]}, tensors)

    def restore(self, state: RuleState) -> None:
        """Restore the staged version; raises ``ValueError`` or ``KeyError`` if the state does not fit."""
        plain, words, buffers = state.plain, state.tensors.get("words"), state.tensors.get("buffers")
        self.version, self.name = int(plain["version"]), str(plain["name"])
        self.published = int(plain["published"][0]), str(plain["published"][1])
        self.words = None if words is None else SparseSlice(self._span, state.tensors.get("offsets"), words)
        self.buffers = b"" if buffers is None else buffers.cpu().numpy().tobytes()


class StagedShard(ModelShard):
    """Values or words that change when a version is published.

    Attributes:
        staged: the next version.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.staged = Staged(self.span)
        self.staged.published = self.version, ""
        self._names: dict[int, str] = {}  # under which the last versions were staged

    @property
    def publication(self) -> str:
        """The publication that the values are."""
        return self.publication_at(self.version)

    def publication_at(self, version: int) -> str:
        """Return the publication that a version of this history is; empty if that is not known."""
        last = self.staged.published
        name = last[1] if last[0] == version else self._names.get(version)
        return "" if name is None else self._named(version, name)

    def bring_to(self, publication: str) -> bool:
        """Tell whether the values are a publication; one that is staged, and shard 0 has published, they become."""
        if self.staged.is_there and self._named(self.staged.version, self.staged.name) == publication:
            self.publish()
        return self.publication == publication

    def _named(self, version: int, name: str) -> str:
        """Return how a publication is called at all shards that have it."""
        return name

    def publish(self) -> int:
        """Make the staged version the shard's, and return it; raises ``ValueError`` if nothing is staged."""
        if not self.staged.is_there:
            raise ValueError("nothing is staged")
        version = self.staged.version
        self._names[version] = self.staged.name  # first: others look it up for the version that they see
        self._names.pop(min(self._names) if len(self._names) > _MOST_NAMES else -1, None)
        if version > self.version:  # else a relay's source has changed other shards alone
            self.apply(self.staged.words, version=version)  # shards that lack versions catch up
        self.staged.published = version, self.staged.name
        self.staged.clear()
        return version

    def _parts(self) -> dict[str, ModelPart]:
        return {**super()._parts(), "staged": self.staged}


def _copied(words: SparseSlice) -> SparseSlice:
    offsets = None if words.offsets is None else words.offsets.clone()
    return replace(words, offsets=offsets, values=words.values.clone())
