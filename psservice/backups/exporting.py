"""From shards to a store: the files of one checkpoint, checked as they pass."""

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from pscore.version import __version__
from psservice.backups.manifest import (
    MOST_MANIFEST_BYTES,
    MOST_TENSOR_BYTES,
    BackupError,
    BackupManifest,
    FileDigest,
    ShardBackup,
    read_shard_manifest,
    require_one_checkpoint,
)
from psservice.backups.store import Store
from psservice.storage.manifest import MANIFEST_NAME, TENSORS_NAME, FileSeal, Manifest

FileHead = tuple[str, int]
"""Name and bytes of a file that a shard sends."""

Sink = Callable[[str, int], AbstractContextManager[Callable[[bytes], None]]]
"""Takes the bytes of a file of this name and size."""


@dataclass(frozen=True, slots=True)
class ReadShard:
    """One shard's part of a checkpoint, which has been read whole: its manifest, and the digests of its files."""

    manifest: Manifest
    digests: dict[str, FileDigest]


def into_nothing(name: str, nbytes: int) -> AbstractContextManager[Callable[[bytes], None]]:
    """Drop a file: a :data:`Sink` of those who only check."""
    return nullcontext(lambda data: None)


def into_store(store: Store, checkpoint: str, folder: str) -> Sink:
    """Return a :data:`Sink` that writes a shard's files to a backup."""
    return lambda name, nbytes: store.writing(checkpoint, folder, name, nbytes)


def read_shard(address: str, parts: Iterator[FileHead | bytes], sink: Sink) -> ReadShard:
    """Read what a shard sends of a checkpoint: each file's name and size, and its bytes behind.

    The manifest comes first. Raises :class:`BackupError` if something else comes, or if the tensors are not those that
    the manifest describes: then they are damaged on the shard's disk.
    """
    manifest: Manifest | None = None
    digests: dict[str, FileDigest] = {}
    for name in (MANIFEST_NAME, TENSORS_NAME):
        head = next(parts, None)
        if not isinstance(head, tuple) or head[0] != name:
            raise BackupError(f"{address} does not send {name} in its turn: it is no server of this release")
        nbytes, kept = head[1], bytearray()
        if not 0 < nbytes <= (MOST_MANIFEST_BYTES if name == MANIFEST_NAME else MOST_TENSOR_BYTES):
            raise BackupError(f"{address} has {name} with {nbytes} bytes, which no checkpoint has")
        digest, crc, left = hashlib.sha256(), 0, nbytes
        with sink(name, nbytes) as write:
            while left:
                data = next(parts, None)
                if not isinstance(data, bytes) or not 0 < len(data) <= left:
                    raise BackupError(f"{address} sends {name} with another size than it has named")
                write(data)
                digest.update(data)
                left -= len(data)
                if name == MANIFEST_NAME:
                    kept += data
                else:
                    crc = zlib.crc32(data, crc)
        if name == MANIFEST_NAME:
            manifest = read_shard_manifest(bytes(kept), f"{name} of {address}")
        elif manifest is None or manifest.tensors != FileSeal(bytes=nbytes, crc32=crc):
            raise BackupError(
                f"{name} of {address} is not the file that its manifest describes: the checkpoint is damaged on that "
                "shard's disk; take another one"
            )
        digests[name] = FileDigest(bytes=nbytes, sha256=digest.hexdigest())
    if next(parts, None) is not None:
        raise BackupError(f"{address} sends more than the files of a checkpoint: it is no server of this release")
    assert manifest is not None
    return ReadShard(manifest, digests)


def manifest_of(shards: Sequence[ReadShard], checkpoint: str, unix_seconds: float) -> BackupManifest:
    """Return the manifest of a backup of these shards, in the order of their indices.

    Raises :class:`BackupError` if they are not one checkpoint of one run.
    """
    parts = [each.manifest for each in shards]
    require_one_checkpoint(parts, checkpoint)
    first = parts[0]
    try:
        return BackupManifest(
            release=__version__,
            checkpoint=checkpoint,
            is_named=first.is_named,
            run_id=first.run_id,
            method=first.method,
            created_unix_seconds=max(each.created_unix_seconds for each in parts),
            exported_unix_seconds=unix_seconds,
            shards=tuple(
                ShardBackup(
                    version=each.manifest.version,
                    generation=each.manifest.generation,
                    start=each.manifest.start,
                    length=each.manifest.length,
                    manifest=each.digests[MANIFEST_NAME],
                    tensors=each.digests[TENSORS_NAME],
                )
                for each in shards
            ),
        ).sealed()
    except ValueError as error:
        raise BackupError(f"the shards' files are not one checkpoint: {error}") from error


def commit(store: Store, manifest: BackupManifest) -> None:
    """Make the files that were written a backup, once the store has each with its size."""
    for index, shard in enumerate(manifest.shards):
        for name, digest in shard.files.items():
            found = store.size(manifest.checkpoint, manifest.folder(index), name)
            if found != digest.bytes:
                where = store.where(manifest.checkpoint, manifest.folder(index), name)
                raise BackupError(f"{where} has {found} bytes of {digest.bytes} after it was written; export again")
    store.commit(manifest)
