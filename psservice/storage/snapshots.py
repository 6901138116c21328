"""Snapshots: a directory each, with the tensors as safetensors and everything else in a manifest.

A snapshot is written under a temporary name, forced to the disk, and renamed: what has a snapshot's name is whole, but
for a disk that forgets. That is what the manifest's sizes and checksums are for.
"""

import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from pscore.model.modelfile import save
from psservice.cluster.checkpoints import place_of
from psservice.storage.files import StorageError, publish, remove_directory
from psservice.storage.manifest import KeptDataset

log = logging.getLogger(__name__)

MANIFEST_NAME, TENSORS_NAME = "manifest.json", "state.safetensors"
_READ_BYTES = 1 << 22


_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class KnownPush(_Strict):
    """The last push of one incarnation, for repeats; step 0 where it only exchanged buffers.

    Attributes:
        own_generation, own_versions: the versions that its pushes have made since its base.
    """

    worker_id: str
    incarnation: str
    step: int
    version: int
    staleness: int
    applied_scale: float
    buffer_step: int
    own_generation: Annotated[int, Field(ge=0, lt=1 << 64)] = 0
    own_versions: list[tuple[_Count, _Count]] = []


class LiveWorker(_Strict):
    """A worker that held a lease."""

    worker_id: str
    incarnation: str
    index_codecs: list[int]
    clock: int


class FileSeal(_Strict):
    """What a file must be."""

    bytes: int
    crc32: int


class Manifest(_Strict):
    """Everything about a shard but its tensors.

    Attributes:
        format: of this manifest.
        checkpoint: an id that the shards of one checkpoint share; "" where it was taken for this shard alone.
        segment: number of the first journal segment behind it.
        version: of the shard.
        generation: of the model.
        start, length: what the shard owns of the flat layout.
        shard_index, num_shards: which shard it was.
        layout: the model's, as the protocol's JSON.
        run_id, run_state, method, method_settings, samples: of the run.
        pushes: what is remembered of each incarnation, least recent first.
        last_pushes: by worker name: incarnation and step of the last push, least recent first.
        workers: who held a lease.
        memory: what the update rule and an open round remember beside their tensors.
        datasets: whose samples are whose; none in what an older server wrote.
        delay_compensation: of the shard, for all records behind this.
        ledger_multiple: of the shard, likewise; of interest with that.
        buffer_weight: weight of the average of buffers.
        last_checkpoint: epoch and number of the newest checkpoint that the shard has taken part in; see
            ``psservice.cluster.checkpoints``.
        clean: taken when the server was told to stop, with nothing applied afterwards.
        created_unix_seconds: when.
        tensors: size and checksum of the file of tensors.
        crc32: of all this, with 0 in its place.
    """

    format: Literal[1] = 1
    checkpoint: str
    segment: _Count
    version: _Count
    generation: Annotated[int, Field(ge=0, lt=1 << 64)]
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
    datasets: list[KeptDataset] = []
    delay_compensation: float
    ledger_multiple: float
    buffer_weight: float
    last_checkpoint: tuple[_Count, _Count] = (0, 0)
    clean: bool
    created_unix_seconds: float
    tensors: FileSeal | None = None
    crc32: int = 0

    @property
    def is_named(self) -> bool:
        """Whether an operator has named the checkpoint: it is kept until it is deleted."""
        return bool(self.checkpoint) and place_of(self.checkpoint) is None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One snapshot on the disk."""

    path: Path
    manifest: Manifest

    def read(self) -> dict[str, torch.Tensor]:
        """Read the tensors.

        Raises:
            StorageError: the file is not what the manifest says.
        """
        path = self.path / TENSORS_NAME
        try:
            if self.manifest.tensors is None or _seal(path) != self.manifest.tensors:
                raise StorageError(f"{path} is not the file that its manifest describes")
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise StorageError(f"cannot read {path}: {error}") from error


def write(directory: Path, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
    """Write a snapshot; tensors are contiguous and on the host.

    Raises:
        OSError: it could not be written; nothing of it is left.
    """
    path = directory / f"{manifest.segment:012d}-v{manifest.version}"
    sealed = manifest

    def fill(temporary: Path) -> None:
        nonlocal sealed
        file = temporary / TENSORS_NAME
        save(file, tensors)
        file.chmod(0o644)
        sealed = _sealed(manifest.model_copy(update={"tensors": _seal(file)}))
        (temporary / MANIFEST_NAME).write_text(sealed.model_dump_json(indent=1))

    publish(path, fill)
    return Snapshot(path, sealed)


def found(directory: Path) -> list[Snapshot]:
    """Return the snapshots of a directory, oldest first; one whose manifest cannot be read is left out, and said."""
    snapshots = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name.startswith("."):
            continue  # of a process that died while it wrote
        try:
            manifest = Manifest.model_validate_json((path / MANIFEST_NAME).read_bytes())
            if manifest != _sealed(manifest):
                raise StorageError("the manifest's checksum does not hold")
        except (OSError, ValidationError, StorageError) as error:
            log.warning("snapshot cannot be read", extra={"path": str(path), "error": str(error)})
            continue
        snapshots.append(Snapshot(path, manifest))
    return sorted(snapshots, key=lambda snapshot: snapshot.manifest.segment)


def last_number(directory: Path) -> int:
    """Return the highest number in the names of snapshots, readable or not; 0 where there is none."""
    heads = (path.name.partition("-v")[0] for path in directory.glob("[0-9]*-v*"))
    return max((int(head) for head in heads if head.isdecimal()), default=0)


def prune(directory: Path, keep: int) -> list[Snapshot]:
    """Remove what need not stay, and unfinished ones; return those that are kept for their journal.

    Of several snapshots of one checkpoint the newest stays. All that have a name stay, and the newest ``keep`` others,
    behind which the journal is kept.
    """
    snapshots = found(directory)
    newest = {each.manifest.checkpoint: each for each in snapshots}
    current = [each for each in snapshots if not each.manifest.checkpoint or newest[each.manifest.checkpoint] is each]
    rotated = [each for each in current if not each.manifest.is_named]
    gone = {each.path for each in snapshots} - {each.path for each in current} | {each.path for each in rotated[:-keep]}
    for path in sorted(gone):
        remove_directory(path)
    remove_unfinished(directory)
    return rotated[-keep:]


def remove_unfinished(directory: Path) -> None:
    """Remove what writers that are dead by now have left."""
    for path in directory.glob(".*.tmp"):
        remove_directory(path)


def _sealed(manifest: Manifest) -> Manifest:
    """Return a manifest with its checksum."""
    whole = manifest.model_copy(update={"crc32": 0})
    return manifest.model_copy(update={"crc32": zlib.crc32(whole.model_dump_json().encode())})


def _seal(path: Path) -> FileSeal:
    crc = size = 0
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            crc, size = zlib.crc32(data, crc), size + len(data)
    return FileSeal(bytes=size, crc32=crc)
