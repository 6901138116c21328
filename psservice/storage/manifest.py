"""A snapshot's manifest: everything about a shard but its tensors."""

import zlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pscore.names import shown
from psservice.storage.files import StorageError

MANIFEST_NAME, TENSORS_NAME = "manifest.json", "state.safetensors"
"""The files of a snapshot."""

_Count = Annotated[int, Field(ge=0, lt=1 << 63)]
_Count64 = Annotated[int, Field(ge=0, lt=1 << 64)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


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
        first_version: with which the run began.
        start, length: of the shard's span of the flat layout.
        layout: the model's, as the protocol's JSON.
        pushes, workers, datasets: of each incarnation, least recent first; of each lease; see the replayer, which reads
            them.
        last_pushes: by worker name: incarnation and step of the last push, least recent first.
        memory: of the update rule and an open round, beside their tensors.
        delay_compensation, ledger_multiple: of the shard, for all records behind this.
        last_checkpoint: the newest that the shard has taken part in; see ``psservice.durability.checkpoints``.
        origins, known_shards: of the shard's history of versions, and the histories of the other shards, as the
            protocol's JSON.
        crc32: of all this, with 0 in its place.
    """

    format: Literal[4] = 4
    checkpoint: str
    is_named: bool
    segment: _Count
    version: _Count
    first_version: _Count
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
    pushes: list[Any]
    last_pushes: dict[str, tuple[str, int]]
    workers: list[Any]
    memory: dict[str, Any]
    datasets: list[Any]
    delay_compensation: float
    ledger_multiple: float
    buffer_weight: float
    last_checkpoint: tuple[_Count, _Count]
    created_unix_seconds: float
    origins: list[dict[str, Any]]
    known_shards: list[dict[str, Any]]
    tensors: FileSeal | None = None
    crc32: int = 0

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> "Manifest":
        """Read a file's content, ``where`` in the message of a :class:`StorageError`."""
        try:
            manifest = cls.model_validate_json(data)
        except ValidationError as error:
            raise StorageError(
                f"{where} is no manifest of a snapshot that this release of psservice can read: {first_fault(error)}"
            ) from error
        if manifest != manifest.sealed(manifest.tensors):
            raise StorageError(f"{where} is damaged: its own checksum does not hold")
        return manifest

    def sealed(self, tensors: FileSeal | None) -> "Manifest":
        """Return the manifest with the seal of its tensors and its own checksum."""
        whole = self.model_copy(update={"tensors": tensors, "crc32": 0})
        return whole.model_copy(update={"crc32": zlib.crc32(whole.model_dump_json().encode())})


def first_fault(error: ValidationError) -> str:
    """Return the first fault of a file in a line, without the file's own text beyond what can be shown."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(each) for each in first["loc"])
    return shown(f"{place + ': ' if place else ''}{first['msg']}")
