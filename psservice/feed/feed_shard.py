"""A shard of a feed: the words of the version that is published, and those of the next one, staged."""

import hashlib
from collections.abc import Collection

from pscore.model.sparse_slice import SparseSlice
from pscore.telemetry.tracing import traced
from pscore.wire.generation import epoch
from psservice.feed.staged_shard import StagedShard
from psservice.rules.base import PLAIN, PushContext

_NAME_DIGITS = 24


class FeedShard(StagedShard):
    """Words that change when a version is published.

    Attributes:
        lacks: the version that shard 0 has published, and that was never staged here; 0 if there is none.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lacks = 0

    def _named(self, version: int, name: str) -> str:
        return f"{epoch(self.generation)}-{version}-{hashlib.sha256(name.encode()).hexdigest()[:_NAME_DIGITS]}"

    def version_after(self, base_version: int) -> int:
        """Return the version that a publication will be: the one behind its base."""
        return base_version + 1

    @traced("apply")
    def take(self, worker: str, push: SparseSlice | None, context: PushContext = PLAIN, step: int = 0) -> int:
        """Stage a publication in the place of another one; return the version that it will be, behind its base."""
        version = self.version_after(self.version if context.base_version is None else context.base_version)
        self.staged.stage(version, context.name, push)
        return version

    def begin_rounds_anew(self, dropped: Collection[str]) -> None:
        """Drop the staged publication: the history that it belongs to has ended."""
        self.staged.clear()
