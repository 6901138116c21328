"""Cuts: the versions of the whole model that readers get."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pscore.model.digest import DIGEST_BYTES, total
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb


class ShardVersion(NamedTuple):
    """One shard's part of a cut: its generation and version, and the 16-byte digest of its values."""

    generation: int
    version: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """A version of the whole model. Cuts are equal if their values and buffers are.

    Attributes:
        run_id: of the run.
        shards: the version of each shard, in order.
        buffers_digest: of the buffers; empty if there are none.
        made: when the server made it, by ``time.monotonic()`` of this process; it may be later by the line's delay. A
            relay makes cuts of its own, later than those of its source.
    """

    run_id: str
    shards: tuple[ShardVersion, ...]
    buffers_digest: bytes = b""
    made: float = field(default=0.0, compare=False)

    @property
    def version(self) -> int:
        """The version of shard 0: how many updates it has applied, as workers count."""
        return self.shards[0].version

    @property
    def digest(self) -> str:
        """The digest of all parameters, 32 hexadecimal digits: the same for the same values, however many shards."""
        return total([shard.digest for shard in self.shards]).hex()

    @property
    def weight_version(self) -> str:
        """A name of these values: run, generation of shard 0, and the sum of the shards' versions."""
        return weight_version(self.run_id, [(shard.generation, shard.version) for shard in self.shards])

    @property
    def name(self) -> str:
        """A name that cuts have in common if they are equal: 24 hexadecimal digits."""
        return hashlib.blake2b(json.dumps(self.to_plain()).encode(), digest_size=12).hexdigest()

    def older_shard(self, other: "Cut") -> int | None:
        """Return a shard with a lower version than in another cut: the run has gone back, or has lost something."""
        pairs = enumerate(zip(self.shards, other.shards, strict=False))
        return next((index for index, (mine, theirs) in pairs if mine.version < theirs.version), None)

    def to_message(self) -> pb.Cut:
        """Return the cut as a server tells it."""
        return pb.Cut(
            run_id=self.run_id,
            shards=[pb.ShardVersion(**each._asdict()) for each in self.shards],
            buffers_digest=self.buffers_digest,
            age_seconds=max(0.0, time.monotonic() - self.made),
        )

    def to_plain(self) -> dict[str, Any]:
        """Return the cut for JSON."""
        return {
            "run_id": self.run_id,
            "shards": [[f"{each.generation:x}", each.version, each.digest.hex()] for each in self.shards],
            "buffers_digest": self.buffers_digest.hex(),
        }

    @classmethod
    def from_plain(cls, plain: Any) -> "Cut":
        """Read what :meth:`to_plain` has returned; raises ``ValueError``, ``KeyError`` or ``TypeError``."""
        shards = [ShardVersion(int(each[0], 16), int(each[1]), bytes.fromhex(each[2])) for each in plain["shards"]]
        if not shards or any(len(each.digest) != DIGEST_BYTES for each in shards):
            raise ValueError("a cut has shards, each with a digest")
        return cls(str(plain["run_id"]), tuple(shards), bytes.fromhex(plain["buffers_digest"]))

    @classmethod
    def from_message(cls, message: pb.Cut) -> "Cut":
        """Read a server's cut; raises :class:`Rejected` if that is none."""
        shards = tuple(ShardVersion(each.generation, each.version, each.digest) for each in message.shards)
        if not shards or any(len(each.digest) != DIGEST_BYTES for each in shards):
            raise Rejected(ErrorCode.BAD_REQUEST, "a cut without shards, or without the digest of one")
        return cls(message.run_id, shards, message.buffers_digest, time.monotonic() - message.age_seconds)


def weight_version(run_id: str, shards: Sequence[tuple[int, int]]) -> str:
    """Return a name of the whole model's values, from the generation and the version of each shard."""
    return f"{run_id}/{shards[0][0]:x}/{sum(version for _, version in shards)}"
