"""Snapshots: a directory each, with the tensors as safetensors and everything else in a manifest.

A snapshot is written under a temporary name, forced to the disk, and renamed: a directory with a snapshot's name is
whole, unless the disk fails, which the manifest's sizes and checksums reveal.
"""

import json
import logging
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from psservice.model.copies import TensorCopy
from psservice.storage.files import Files, StorageError, discard
from psservice.storage.formats import OtherReleaseError
from psservice.storage.manifest import MANIFEST_NAME, TENSORS_NAME, FileSeal, Manifest

log = logging.getLogger(__name__)

_PIN_NAME = "pinned"
_READ_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One snapshot on the disk.

    ``is_pinned`` tells whether an operator has pinned the snapshot: an empty file ``pinned`` beside the others.
    """

    path: Path
    manifest: Manifest
    files: Files
    is_pinned: bool = False

    @property
    def is_kept(self) -> bool:
        """Whether the snapshot stays until an operator deletes it."""
        return self.manifest.is_named or self.is_pinned

    def open(self) -> list[tuple[str, int, BinaryIO]]:
        """Open the files of the snapshot to read: name, bytes and file of each, the manifest first.

        What is open can be read to its end, also if the snapshot is removed meanwhile. Raises :class:`StorageError`.
        """
        opened: list[tuple[str, int, BinaryIO]] = []
        try:
            for name in (MANIFEST_NAME, TENSORS_NAME):
                file = self.files.open(self.path / name)
                opened.append((name, file.seek(0, os.SEEK_END), file))
                file.seek(0)
        except OSError as error:
            for _, _, file in opened:
                file.close()
            raise StorageError(f"cannot read {self.path}: {error}") from error
        return opened

    def pin(self) -> None:
        """Keep the snapshot until it is deleted; raises :class:`StorageError`."""
        try:
            self.files.write(self.path / _PIN_NAME, b"")
            self.files.sync(self.path / _PIN_NAME)
            self.files.sync(self.path)
        except OSError as error:
            raise StorageError(f"cannot pin {self.path}: {error.strerror or error}") from error

    def read(self) -> dict[str, torch.Tensor]:
        """Read the tensors; raises :class:`StorageError` if the file is not the one of the manifest."""
        path = self.path / TENSORS_NAME
        try:
            if _seal(self.files, path) != self.manifest.tensors:
                raise StorageError(f"{path} is not the file that its manifest describes")
            return self.files.load_tensors(path)
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error}") from error


def name_of(manifest: Manifest) -> str:
    """Return the name of a snapshot's directory."""
    return f"{manifest.segment:012d}-v{manifest.version}"


def prepare(files: Files, directory: Path, manifest: Manifest, tensors: Mapping[str, TensorCopy]) -> Manifest:
    """Write a snapshot that has no name yet, and return its sealed manifest.

    Raises ``OSError``, and then nothing of it is left, unless the disk refuses to remove it too.
    """
    temporary = _unnamed(directory, manifest)
    try:
        files.make_directory(temporary)
        files.save_tensors(temporary / TENSORS_NAME, tensors)
        manifest = manifest.sealed(_seal(files, temporary / TENSORS_NAME))
        files.write(temporary / MANIFEST_NAME, manifest.model_dump_json(indent=1).encode())
        for each in (temporary / TENSORS_NAME, temporary / MANIFEST_NAME, temporary):
            files.sync(each)
    except BaseException:
        discard(files, temporary)
        raise
    return manifest


def commit(files: Files, directory: Path, manifest: Manifest) -> Snapshot:
    """Give a prepared snapshot its name; raises as :func:`prepare`."""
    path, temporary = directory / name_of(manifest), _unnamed(directory, manifest)
    try:
        files.rename(temporary, path)
        files.sync(directory)
    except BaseException:
        for each in (temporary, path):
            discard(files, each)
        raise
    return Snapshot(path, manifest, files)


def abandon(files: Files, directory: Path, manifest: Manifest) -> None:
    """Remove a prepared snapshot."""
    discard(files, _unnamed(directory, manifest))


def _unnamed(directory: Path, manifest: Manifest) -> Path:
    return directory / f".{name_of(manifest)}.tmp"


def readable(files: Files, directory: Path) -> list[Snapshot]:
    """Return the snapshots of a directory, oldest first; one whose manifest cannot be read is left out and logged.

    Raises :class:`OtherReleaseError` if another release wrote one.
    """
    snapshots = []
    for name in files.list(directory):
        if name.startswith("."):
            continue  # of a process that died while it wrote
        path = directory / name
        try:
            with files.open(path / MANIFEST_NAME) as file:
                data = file.read()
            _require_format(path / MANIFEST_NAME, data)
            manifest = Manifest.from_bytes(data, str(path / MANIFEST_NAME))
        except OtherReleaseError:
            raise
        except (OSError, StorageError) as error:
            log.warning("snapshot cannot be read", extra={"path": str(path), "error": str(error)})
            continue
        snapshots.append(Snapshot(path, manifest, files, is_pinned=_PIN_NAME in files.list(path)))
    return sorted(snapshots, key=lambda snapshot: snapshot.manifest.segment)


def _require_format(path: Path, data: bytes) -> None:
    """Raise :class:`OtherReleaseError` if a manifest has another format."""
    try:
        found = json.loads(data)["format"]
    except (ValueError, KeyError, TypeError):
        return  # damaged
    ours = Manifest.model_fields["format"].default
    if isinstance(found, int) and found != ours:
        raise OtherReleaseError(path, f"format {found}, this release reads {ours}", is_newer=found > ours)


def newest_number(files: Files, directory: Path) -> int:
    """Return the highest number in the names of snapshots, readable or not; 0 if there is none."""
    heads = (name.partition("-v")[0] for name in files.list(directory) if "-v" in name)
    return max((int(head) for head in heads if head.isdecimal()), default=0)


def prune(files: Files, directory: Path, keep: int) -> list[Snapshot]:
    """Remove old snapshots, and unfinished ones; return those behind which the journal is kept.

    Of several snapshots of one checkpoint the newest stays. All that have a name or are pinned stay, and the newest
    ``keep`` others, which are returned.
    """
    snapshots = readable(files, directory)
    newest = {each.manifest.checkpoint: each for each in snapshots}
    current = [each for each in snapshots if not each.manifest.checkpoint or newest[each.manifest.checkpoint] is each]
    rotated = [each for each in current if not each.is_kept]
    for each in snapshots:
        if each not in current or each in rotated[:-keep]:
            discard(files, each.path)
    remove_unfinished(files, directory)
    return rotated[-keep:]


def remove_unfinished(files: Files, directory: Path) -> None:
    """Remove the unfinished snapshots of processes that have died."""
    for name in files.list(directory):
        if name.startswith(".") and name.endswith(".tmp"):
            discard(files, directory / name)


def _seal(files: Files, path: Path) -> FileSeal:
    crc = size = 0
    with files.open(path) as file:
        while data := file.read(_READ_BYTES):
            crc, size = zlib.crc32(data, crc), size + len(data)
    return FileSeal(bytes=size, crc32=crc)
