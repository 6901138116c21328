"""A backup's manifest: which checkpoint of which run, and size and digest of every file.

A store has a folder for each backup, ``CHECKPOINT/``, with ``backup.json`` (this) and for each shard the files of its
snapshot as the shard has them: ``shard-0-of-2/manifest.json`` and ``shard-0-of-2/state.safetensors``. The names follow
from the number of shards: a manifest names no path. It is written last, so a folder without one is no backup.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from pscore.names import is_name, shown
from psservice.storage.files import StorageError
from psservice.storage.manifest import MANIFEST_NAME, TENSORS_NAME, Manifest, first_fault

BACKUP_NAME = "backup.json"
"""The file of a backup that is written last."""

MOST_BACKUP_BYTES = 16 << 20
"""Of a backup's manifest."""

MOST_MANIFEST_BYTES, MOST_TENSOR_BYTES = 256 << 20, 1 << 50
"""Of a shard's manifest, which is read whole, and of its tensors."""

_FORMAT: Literal[1] = 1
_MOST_SHARDS = 4096
_LATEST = 1e12  # Unix seconds


class BackupError(Exception):
    """A backup cannot be written, read or used; the message names it, the fault and the next step."""


def _require_name(text: str) -> str:
    if not is_name(text):
        raise ValueError("it must be 1 to 256 printable characters")
    return text


def _require_name_or_nothing(text: str) -> str:
    return _require_name(text) if text else text


_Name = Annotated[str, AfterValidator(_require_name)]
_NameOrNothing = Annotated[str, AfterValidator(_require_name_or_nothing)]
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]
_Seconds = Annotated[float, Field(ge=0, le=_LATEST)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class FileDigest(_Strict):
    """Size and SHA-256 (hexadecimal) that a file must have."""

    bytes: Annotated[int, Field(ge=1, le=MOST_TENSOR_BYTES)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ShardBackup(_Strict):
    """One shard of a backup.

    Attributes:
        generation: of the model.
        start, length: of the shard's span of the flat layout, elements.
        manifest, tensors: of the files ``manifest.json`` and ``state.safetensors``.
    """

    version: _Count
    generation: Annotated[int, Field(ge=0, lt=1 << 64)]
    start: _Count
    length: _Count
    manifest: FileDigest
    tensors: FileDigest

    @property
    def files(self) -> dict[str, FileDigest]:
        """Digests by file name, in the order in which files are read."""
        return {MANIFEST_NAME: self.manifest, TENSORS_NAME: self.tensors}

    @property
    def total_bytes(self) -> int:
        """Of both files."""
        return self.manifest.bytes + self.tensors.bytes


class BackupManifest(_Strict):
    """What a backup has.

    Attributes:
        release: of psservice that exported it.
        checkpoint: its id or name, which the shards' manifests have too.
        is_named: whether an operator has named the checkpoint.
        method: of the run; empty if no worker had joined.
        created_unix_seconds: when the last shard took part in the checkpoint.
        exported_unix_seconds: when the manifest was written.
        shards: by shard index.
        sha256: of all this, with "" in its place.
    """

    format: Literal[1] = _FORMAT
    release: _Name
    checkpoint: _Name
    is_named: bool
    run_id: _NameOrNothing
    method: _NameOrNothing
    created_unix_seconds: _Seconds
    exported_unix_seconds: _Seconds
    shards: Annotated[tuple[ShardBackup, ...], Field(min_length=1, max_length=_MOST_SHARDS, strict=False)]
    sha256: str = ""

    @model_validator(mode="after")
    def _require_whole(self) -> "BackupManifest":
        if any(each.manifest.bytes > MOST_MANIFEST_BYTES for each in self.shards):
            raise ValueError(f"a shard's {MANIFEST_NAME} has more than {MOST_MANIFEST_BYTES} bytes")
        end = 0
        for index, each in enumerate(self.shards):
            if each.start != end:
                raise ValueError(f"shard {index} begins at element {each.start}, and the shards before it end at {end}")
            end += each.length
        return self

    @property
    def num_shards(self) -> int:
        """How many shards the run has."""
        return len(self.shards)

    @property
    def total_bytes(self) -> int:
        """Of all files but this."""
        return sum(each.total_bytes for each in self.shards)

    def folder(self, index: int) -> str:
        """Return the name of a shard's folder, in a store and in a data directory."""
        return f"shard-{index}-of-{self.num_shards}"

    def sealed(self) -> "BackupManifest":
        """Return the manifest with its own digest."""
        whole = self.model_copy(update={"sha256": ""})
        return whole.model_copy(update={"sha256": hashlib.sha256(whole.model_dump_json().encode()).hexdigest()})

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        return self.model_dump_json(indent=1).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> "BackupManifest":
        """Read a file's content; raises :class:`BackupError`."""
        if len(data) > MOST_BACKUP_BYTES:
            raise BackupError(f"{where} has more than {MOST_BACKUP_BYTES} bytes: it is no backup's manifest")
        _require_format(data, where)
        try:
            manifest = cls.model_validate_json(data)
        except ValidationError as error:
            raise BackupError(f"{where} is no backup's manifest: {first_fault(error)}") from error
        if manifest != manifest.sealed():
            raise BackupError(f"{where} is damaged: its own digest does not hold; use another backup")
        return manifest

    def require_part(self, index: int, part: Manifest, where: str) -> None:
        """Check that a shard's manifest is the one of this backup; raises :class:`BackupError`."""
        mine = self.shards[index]
        for what, found, meant in (
            ("of checkpoint", part.checkpoint, self.checkpoint),
            ("of run", part.run_id, self.run_id),
            ("of shard", part.shard_index, index),
            ("of a run of so many shards:", part.num_shards, self.num_shards),
            ("of version", part.version, mine.version),
            ("of generation", part.generation, mine.generation),
            ("for elements from", part.start, mine.start),
            ("for a number of elements:", part.length, mine.length),
        ):
            if found != meant:
                raise BackupError(
                    f"{where} is {what} {shown(repr(found))}, and {BACKUP_NAME} says {shown(repr(meant))}: the files "
                    "of this backup do not belong together; use another one"
                )
        if part.tensors is None or part.tensors.bytes != mine.tensors.bytes:
            raise BackupError(f"{where} and {BACKUP_NAME} disagree on the size of {TENSORS_NAME}; use another backup")


def read_shard_manifest(data: bytes, where: str) -> Manifest:
    """Read a shard's ``manifest.json``; raises :class:`BackupError`."""
    try:
        return Manifest.from_bytes(data, where)
    except StorageError as error:
        raise BackupError(str(error)) from error


def require_one_checkpoint(parts: Sequence[Manifest], checkpoint: str) -> None:
    """Check that shards' manifests, in order of their indices, are one checkpoint of one run.

    Raises :class:`BackupError`.
    """
    first = parts[0]
    for index, part in enumerate(parts):
        for what, found, meant in (
            ("checkpoint", part.checkpoint, checkpoint),
            ("run", part.run_id, first.run_id),
            ("number of shards", part.num_shards, len(parts)),
            ("shard", part.shard_index, index),
            ("model", part.layout, first.layout),
        ):
            if found != meant:
                raise BackupError(
                    f"shard {index} answers with a file of another {what} than it should"
                    + ("" if what == "model" else f": {shown(repr(found))}, not {shown(repr(meant))}")
                )


def _require_format(data: bytes, where: str) -> None:
    """Raise :class:`BackupError` if a manifest says that it has another format."""
    try:
        found: Any = json.loads(data)["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return  # no manifest, as is said then
    if type(found) is int and found != _FORMAT:
        which = "a newer" if found > _FORMAT else "an earlier"
        raise BackupError(
            f"{where} was written by {which} release of psservice (format {shown(str(found))}, this release reads "
            f"{_FORMAT}): import it with that release"
        )
