"""A shard of a relay: its versions are those of the source's counterpart."""

from collections.abc import Sequence
from typing import NamedTuple

from psservice.model.parameters import ModelPart, ModelShard
from psservice.rules.base import RuleState


class Place(NamedTuple):
    """A shard's generation and version."""

    generation: int
    version: int


class RelayedCut:
    """The source's cut that a shard's version belongs to.

    Attributes:
        shards: of every shard of the source, in order.
    """

    def __init__(self) -> None:
        self.shards: tuple[Place, ...] = ()

    def export(self) -> RuleState:
        """Return the cut."""
        return RuleState({"shards": [[f"{each.generation:x}", each.version] for each in self.shards]}, {})

    def restore(self, state: RuleState) -> None:
        """Restore a cut; raises ``ValueError`` or ``KeyError`` if the state does not fit."""
        self.shards = tuple(Place(int(each[0], 16), int(each[1])) for each in state.plain["shards"])


class RelayedShard(ModelShard):
    """Values or words that are assigned.

    Attributes:
        cut: of the source.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cut = RelayedCut()
        self._named = -1, ""

    def publication_at(self, version: int) -> str:
        """Return the name of the source's cut that a version is of; empty if that is not known any more."""
        name = self._named
        return name[1] if name[0] == version else ""

    def relay(self, shards: Sequence[Place]) -> None:
        """Note of which cut the version is."""
        self.cut.shards = (*shards,)
        self._named = self.version, "-".join(f"{each.generation:x}.{each.version}" for each in shards)

    def restore(self, state: RuleState) -> None:
        """Restore an exported state; raises ``ValueError`` or ``KeyError`` if the state does not fit."""
        super().restore(state)
        self.relay(self.cut.shards)

    def _parts(self) -> dict[str, ModelPart]:
        return {**super()._parts(), "cut": self.cut}
