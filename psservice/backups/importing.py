"""From a store to empty data directories: every file is checked before a server can find it.

What is read is written below ``DIR/.import``, forced to the disk, and then renamed to ``DIR/shard-I-of-N``. While
``DIR/.import`` is there no server starts in ``DIR``. It has the backup's manifest: an import that broke off is taken up
by the next one of the same backup, which leaves the shards that are in place.
"""

import hashlib
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pscore.units import human_bytes
from psservice.backups.manifest import BACKUP_NAME, BackupError, BackupManifest, FileDigest, read_shard_manifest
from psservice.backups.store import Store
from psservice.storage import snapshots
from psservice.storage.datadir import IMPORT_NAME
from psservice.storage.files import DISK, OpenFile, StorageError
from psservice.storage.lock_file import LockFile, Watermark
from psservice.storage.manifest import MANIFEST_NAME, FileSeal, Manifest


def check_files(store: Store, manifest: BackupManifest, index: int) -> None:
    """Read all files of one shard of a backup; raises :class:`BackupError` unless they are those of its manifest."""
    _fetch(store, manifest, index, _drop)


def import_backup(store: Store, manifest: BackupManifest, data_dir: Path, shards: Sequence[int]) -> list[Path]:
    """Put these shards of a backup into a data directory; return the shards' folders there, in the same order.

    Raises :class:`BackupError`; no shard is then in place that was not before.
    """
    folders = [data_dir / manifest.folder(index) for index in shards]
    staging = data_dir / IMPORT_NAME
    with _disk_errors(data_dir):
        DISK.make_directory(data_dir)
        with _claimed(staging, manifest, data_dir, folders):
            missing = [(index, folder) for index, folder in zip(shards, folders, strict=True) if not folder.exists()]
            _require_room(data_dir, sum(manifest.shards[index].total_bytes for index, _ in missing))
            for index, folder in missing:
                _stage(store, manifest, index, staging / folder.name)
            for _, folder in missing:
                DISK.rename(staging / folder.name, folder)
            DISK.sync(data_dir)
    return folders


def _stage(store: Store, manifest: BackupManifest, index: int, folder: Path) -> None:
    """Write one shard's data directory under a name that no server looks for."""
    arriving = folder / "snapshots" / ".arriving"
    DISK.make_directory(arriving)

    def write(name: str, pieces: Iterator[bytes]) -> None:
        with (arriving / name).open("wb") as file:
            for data in pieces:
                file.write(data)
        DISK.sync(arriving / name)

    part = _fetch(store, manifest, index, write)
    DISK.sync(arriving)
    DISK.rename(arriving, arriving.with_name(snapshots.name_of(part)))
    DISK.sync(arriving.parent)
    # The lock is that of a server which has died with this snapshot and promises nothing of a journal: the start
    # begins a new history, since the servers that were backed up may have gone on.
    lock = LockFile(folder, DISK)
    try:
        lock.begin(Watermark(snapshot=part.segment, generation=part.generation))
    finally:
        lock.close()


def _drop(name: str, pieces: Iterator[bytes]) -> None:
    for _ in pieces:
        pass


def _fetch(
    store: Store, manifest: BackupManifest, index: int, write: Callable[[str, Iterator[bytes]], None]
) -> Manifest:
    """Read the files of a shard and have them written; raises :class:`BackupError` for any that is not the backup's."""
    folder, part = manifest.folder(index), None
    for name, digest in manifest.shards[index].files.items():
        checked = _Checked(store, manifest.checkpoint, folder, name, digest)
        write(name, checked.pieces(keep=name == MANIFEST_NAME))
        if name == MANIFEST_NAME:
            part = read_shard_manifest(bytes(checked.kept), checked.where)
            manifest.require_part(index, part, checked.where)
        elif part is None or part.tensors != FileSeal(bytes=digest.bytes, crc32=checked.crc32):
            raise BackupError(f"{checked.where} is not the file that {MANIFEST_NAME} beside it describes")
    assert part is not None
    return part


class _Checked:
    """Reads a file of a backup, and raises :class:`BackupError` at its end if its size or digest is another.

    Attributes:
        kept: its content, if asked for.
        crc32: of its content.
    """

    def __init__(self, store: Store, checkpoint: str, folder: str, name: str, digest: FileDigest) -> None:
        self._store, self._place, self._digest = store, (checkpoint, folder, name), digest
        self.where = store.where(*self._place)
        self.kept, self.crc32 = bytearray(), 0

    def pieces(self, *, keep: bool) -> Iterator[bytes]:
        """Yield the content."""
        meant, found = self._digest.bytes, self._store.size(*self._place)
        if found is None:
            raise BackupError(f"{self.where} is missing; use another backup")
        if found != meant:
            what = "cut off" if found < meant else "too long"
            raise BackupError(f"{self.where} is {what}: it has {found} bytes of {meant}; use another backup")
        digest, count = hashlib.sha256(), 0
        for data in self._store.pieces(*self._place):
            count += len(data)
            if count > meant:
                break
            digest.update(data)
            self.crc32 = zlib.crc32(data, self.crc32)
            if keep:
                self.kept += data
            yield data
        if count != meant or digest.hexdigest() != self._digest.sha256:
            raise BackupError(f"{self.where} is damaged: its digest is not that of {BACKUP_NAME}; use another backup")


@contextmanager
def _claimed(staging: Path, manifest: BackupManifest, data_dir: Path, folders: Sequence[Path]) -> Iterator[None]:
    """Have the data directory for this import alone; what is not in place at the end is removed."""
    _require_free(staging, manifest, data_dir, folders)
    try:
        DISK.make_directory(staging)
        lock = OpenFile(staging / "lock", 0)
    except OSError as error:
        raise BackupError(f"cannot write to {data_dir} (--data-dir): {error.strerror}") from error
    try:
        try:
            lock.lock()
        except OSError as error:
            raise BackupError(f"another import into {data_dir} is running; wait for it") from error
        for each in DISK.list(staging):  # of an import that broke off
            if (staging / each).is_dir():
                shutil.rmtree(staging / each)
        try:
            (staging / f"{BACKUP_NAME}.new").write_bytes(manifest.to_bytes())
            DISK.sync(staging / f"{BACKUP_NAME}.new")
            DISK.rename(staging / f"{BACKUP_NAME}.new", staging / BACKUP_NAME)
            DISK.sync(staging)
            DISK.sync(data_dir)
            yield
        except BaseException:
            if not any(folder.exists() for folder in folders):
                shutil.rmtree(staging, ignore_errors=True)
            raise
        shutil.rmtree(staging)
        DISK.sync(data_dir)
    finally:
        lock.close()


def _require_free(staging: Path, manifest: BackupManifest, data_dir: Path, folders: Sequence[Path]) -> None:
    """Raise :class:`BackupError` if the place is taken, unless by an import of the same backup that broke off."""
    is_again = (staging / BACKUP_NAME).exists()
    if is_again:
        before = BackupManifest.from_bytes((staging / BACKUP_NAME).read_bytes(), str(staging / BACKUP_NAME))
        if before != manifest:
            raise BackupError(
                f"an import of {before.checkpoint!r} of run {before.run_id!r} into {data_dir} broke off: run that one "
                f"again, or remove {staging} and the shards' folders beside it"
            )
    for name in DISK.list(data_dir):
        if name.startswith("shard-") and name.rpartition("-of-")[2] != str(manifest.num_shards):
            raise BackupError(
                f"{data_dir / name} is of a run with another number of shards than the backup, which has "
                f"{manifest.num_shards}; import into another --data-dir"
            )
    taken = next((folder for folder in folders if folder.exists()), None)
    if taken is not None and not is_again:
        raise BackupError(
            f"{taken} is there already, and nothing is written over it: move it away, or import into another --data-dir"
        )


def _require_room(data_dir: Path, nbytes: int) -> None:
    free = shutil.disk_usage(data_dir).free
    if free < nbytes:
        raise BackupError(
            f"{data_dir} has room for {human_bytes(free)}, and the shards of the backup have {human_bytes(nbytes)}; "
            "nothing was written"
        )


@contextmanager
def _disk_errors(data_dir: Path) -> Iterator[None]:
    """Raise :class:`BackupError` for what the disk refuses."""
    try:
        yield
    except OSError as error:
        raise BackupError(f"cannot write to {data_dir} (--data-dir): {error.strerror or error}") from error
    except StorageError as error:
        raise BackupError(str(error)) from error
