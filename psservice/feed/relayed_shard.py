"""A shard of a relay: its versions are those of the source's counterpart."""

import torch

from pscore.model.sparse_slice import SparseSlice
from psservice.feed.staged_shard import StagedShard
from psservice.model.parameters import ModelPart
from psservice.rules.base import RuleState


class RelayedShard(StagedShard):
    """Values or words that are assigned when all shards have their part of a cut of the source.

    A publication is called as :attr:`~pscore.reader.cut.Cut.name` calls the cut.

    Attributes:
        successor: the model of another generation that is staged, whole; ``None`` if there is none. Differences may
            bring it to newer versions before it takes this one's place.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.successor: RelayedShard | None = None

    def cuts_here(self) -> list[str]:
        """Return the names of the source's cuts that are published or staged here; from any thread."""
        return [name for name in (self.publication, self.staged.name) if name]

    def base(self, generation: int, version: int | None = None) -> "RelayedShard | None":
        """Return the model to which differences of a generation, at a version if it is given, are to be added."""
        for model in (self.successor, self):
            if model is not None and model.generation == generation and version in (None, model.version):
                return model
        return None

    def stage(self, base: "RelayedShard", version: int, name: str, update: SparseSlice | None, buffers: bytes) -> None:
        """Stage a difference from one of the two models, in the place of the version staged before."""
        if base is self:
            self.successor = None
            self.staged.stage(version, name, update, buffers)
            return
        if version > base.version:
            base.apply(update, version=version)
        self.staged.stage(version, name, None, buffers)

    def stage_whole(self, generation: int, version: int, name: str, values: torch.Tensor, buffers: bytes) -> None:
        """Stage all values of another generation's version, in the place of the version staged before."""
        self.successor = self._successor_of(generation, version, values.to(self.theta.device, copy=True))
        self.staged.stage(version, name, None, buffers)

    def _successor_of(self, generation: int, version: int, theta: torch.Tensor) -> "RelayedShard":
        return RelayedShard(
            self.layout,
            self.span,
            theta,
            generation=generation,
            version=version,
            settings=self.settings,
            mode=self.mode,
            clock=self.clock,
            first_version=version,
            copies=self.copies,  # snapshots of this model have the other one's values too
        )

    def publish(self) -> int:
        """See :class:`StagedShard`; raises ``ValueError`` too if the staged version is of another model."""
        if self.successor is not None:
            raise ValueError("another model takes this one's place")
        return super().publish()

    def bring_to(self, publication: str) -> bool:
        """See :class:`StagedShard`; another model is not brought in."""
        return self.publication == publication if self.successor is not None else super().bring_to(publication)

    def _parts(self) -> dict[str, ModelPart]:
        return {**super()._parts(), "successor": _SuccessorPart(self)}


class _SuccessorPart:
    """The successor of a shard, in its state."""

    def __init__(self, shard: RelayedShard) -> None:
        self._shard = shard

    def export(self) -> RuleState:
        found = self._shard.successor
        if found is None:
            return RuleState({}, {})
        return RuleState({"generation": f"{found.generation:x}", "version": found.version}, {"theta": found.theta})

    def restore(self, state: RuleState) -> None:
        self._shard.successor = None
        if state.plain:
            generation, version = int(state.plain["generation"], 16), int(state.plain["version"])
            self._shard.successor = self._shard._successor_of(generation, version, state.tensors["theta"])
