"""A snapshot's manifest: everything about a shard but its tensors."""

import zlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_Count = Annotated[int, Field(ge=0, lt=1 << 63)]
_Count64 = Annotated[int, Field(ge=0, lt=1 << 64)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class KeptShare(_Strict):
    """The ranges ``(start, end)`` that one worker has, or has left."""

    worker_id: str
    incarnation: str
    ranges: list[tuple[_Count64, _Count64]]


class KeptEpoch(_Strict):
    """One epoch; see ``psservice.sampling.dataset``."""

    epoch: _Count64
    fresh: _Count64
    held: list[KeptShare]
    returned: list[KeptShare]


class KeptDataset(_Strict):
    """One dataset; see ``psservice.sampling.dataset``."""

    name: str
    size: _Count64
    seed: _Count64
    shuffle: bool
    newest: _Count64
    epochs: list[KeptEpoch]


class KnownPush(_Strict):
    """The last push of one incarnation, for repeats; step 0 where the worker has exchanged buffers only.

    ``own_versions`` are the versions that the incarnation's pushes have made since its base.
    """

    worker_id: str
    incarnation: str
    step: int
    version: int
    staleness: int
    applied_scale: float
    buffer_step: int
    own_generation: _Count64
    own_versions: list[tuple[_Count, _Count]]


class LiveWorker(_Strict):
    """A worker that had a lease."""

    worker_id: str
    incarnation: str
    index_codecs: list[int]
    clock: int


class FileSeal(_Strict):
    """Size and checksum that a file must have."""

    bytes: int
    crc32: int


class Manifest(_Strict):
    """Everything about a shard but its tensors.

    Attributes:
        checkpoint: an id that the shards of one checkpoint share; "" where it was taken for this shard alone.
        is_named: whether an operator has named the checkpoint: it is kept until it is deleted.
        segment: number of the first journal segment behind it.
        start, length: of the shard's span of the flat layout.
        layout: the model's, as the protocol's JSON.
        pushes: of each incarnation, least recent first.
        last_pushes: by worker name: incarnation and step of the last push, least recent first.
        memory: of the update rule and an open round, beside their tensors.
        delay_compensation, ledger_multiple: of the shard, for all records behind this.
        last_checkpoint: the newest that the shard has taken part in; see ``psservice.cluster.checkpoints``.
        crc32: of all this, with 0 in its place.
    """

    format: Literal[2] = 2
    checkpoint: str
    is_named: bool
    segment: _Count
    version: _Count
    generation: _Count64
    start: _Count
    length: _Count
    shard_index: _Count
    num_shards: _Count
    layout: dict[str, Any]
    run_id: str
    run_state: Literal["empty", "training", "finished"]
    method: str
    method_settings: dict[str, str]
    samples: _Count
    pushes: list[KnownPush]
    last_pushes: dict[str, tuple[str, int]]
    workers: list[LiveWorker]
    memory: dict[str, Any]
    datasets: list[KeptDataset]
    delay_compensation: float
    ledger_multiple: float
    buffer_weight: float
    last_checkpoint: tuple[_Count, _Count]
    created_unix_seconds: float
    tensors: FileSeal | None = None
    crc32: int = 0

    def sealed(self, tensors: FileSeal | None) -> "Manifest":
        """Return the manifest with the seal of its tensors and its own checksum."""
        whole = self.model_copy(update={"tensors": tensors, "crc32": 0})
        return whole.model_copy(update={"crc32": zlib.crc32(whole.model_dump_json().encode())})
