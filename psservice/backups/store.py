"""A store of backups: a folder on this machine, or wherever fsspec has a file system for (``s3://BUCKET/FOLDER``)."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, unquote

import fsspec
from fsspec.implementations.local import LocalFileSystem

from pscore.files import make_folder, put_in_place, sync_folder
from pscore.names import escaped, shown
from psservice.backups.manifest import BACKUP_NAME, MOST_BACKUP_BYTES, BackupError, BackupManifest

_PIECE_BYTES = 1 << 20
_LEAST_BLOCK_BYTES, _MOST_BLOCKS = 8 << 20, 9000  # of an upload in parts: S3 takes 10,000 of 5 MiB or more
_LONGEST_FOLDER = 200  # bytes; file systems take 255
_ABSENT = {"s3": "pip install 'sparseps[s3]'", "s3a": "pip install 'sparseps[s3]'"}


class Store:
    """Backups under a URL, a folder each; raises :class:`BackupError` if there is no such file system.

    Thread-safe as far as the file system is. Credentials and the endpoint are those of the file system's own
    environment variables (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``).
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") or url
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.url, skip_instance_cache=True)
        except ImportError as error:
            scheme = url.partition(":")[0]
            advice = _ABSENT.get(scheme, "install what fsspec needs for it")
            raise BackupError(f"{shown(url)}: {error}; {advice}") from error
        except Exception as error:  # of whatever file system that is
            raise BackupError(f"{shown(url)} cannot be opened as a store: {error}") from error
        self._root = str(self._root).rstrip("/")
        self._is_local = isinstance(self._files, LocalFileSystem)

    def where(self, checkpoint: str, *names: str) -> str:
        """Return the place of a backup, or of a file in it, for a message."""
        return escaped("/".join((self.url, folder_of(checkpoint), *names)))

    def checkpoints(self) -> list[str]:
        """Return the checkpoints of which the store has something, a backup or the rest of one."""
        try:
            with self._reading(escaped(self.url)):
                self._files.invalidate_cache()
                entries = self._files.ls(self._root, detail=True)
        except _AbsentError:
            if self._is_local:
                raise
            return []  # a folder of an object store is there once something is in it
        names = [str(each["name"]).rstrip("/").rpartition("/")[2] for each in entries if each["type"] == "directory"]
        return sorted(name for each in names if folder_of(name := unquote(each), most=None) == each)

    def manifest(self, checkpoint: str) -> BackupManifest | None:
        """Read a backup's manifest; ``None`` if there is none. Raises :class:`BackupError` if it is damaged."""
        where = self.where(checkpoint, BACKUP_NAME)
        try:
            with self._reading(where), self._files.open(self._path(checkpoint, BACKUP_NAME), "rb") as file:
                data = file.read(MOST_BACKUP_BYTES + 1)
        except _AbsentError:
            return None
        found = BackupManifest.from_bytes(data, where)
        if found.checkpoint != checkpoint:
            raise BackupError(f"{where} is of checkpoint {shown(found.checkpoint)!r}: somebody has renamed its folder")
        return found

    def require(self, checkpoint: str) -> BackupManifest:
        """Read a backup's manifest; raises :class:`BackupError` also if there is none."""
        found = self.manifest(checkpoint)
        if found is None:
            raise BackupError(
                f"{escaped(self.url)} has no backup {checkpoint!r}: `psservice checkpoint list --from` names those "
                "that it has"
            )
        return found

    def size(self, checkpoint: str, folder: str, name: str) -> int | None:
        """Return the bytes of a file of a backup; ``None`` if there is no such file."""
        try:
            with self._reading(self.where(checkpoint, folder, name)):
                self._files.invalidate_cache()
                return int(self._files.size(self._path(checkpoint, folder, name)))
        except _AbsentError:
            return None

    def pieces(self, checkpoint: str, folder: str, name: str) -> Iterator[bytes]:
        """Read a file of a backup, about a MiB at a time."""
        with self._reading(self.where(checkpoint, folder, name)):
            file = self._files.open(self._path(checkpoint, folder, name), "rb", block_size=_LEAST_BLOCK_BYTES)
        with file:
            while True:
                with self._reading(self.where(checkpoint, folder, name)):
                    data = file.read(_PIECE_BYTES)
                if not data:
                    return
                yield data

    @contextmanager
    def writing(self, checkpoint: str, folder: str, name: str, nbytes: int) -> Iterator[Callable[[bytes], None]]:
        """Write a file of a backup, of so many bytes: whatever had its name before is replaced."""
        where, path = self.where(checkpoint, folder, name), self._path(checkpoint, folder, name)
        with self._reading(where):
            if self._is_local:
                make_folder(Path(self._path(checkpoint, folder)))
            else:
                self._files.makedirs(self._path(checkpoint, folder), exist_ok=True)
            block = max(_LEAST_BLOCK_BYTES, -(-nbytes // _MOST_BLOCKS))
            file = self._files.open(path, "wb", block_size=block)
        is_whole = False

        def write(data: bytes) -> None:
            with self._reading(where):
                file.write(data)

        try:
            yield write
            is_whole = True
        finally:
            with self._reading(where) if is_whole else _dropped():
                if is_whole and self._is_local:
                    _sync(file)
                file.close()

    def commit(self, manifest: BackupManifest) -> None:
        """Write the manifest, which makes the files before it a backup."""
        checkpoint, where = manifest.checkpoint, self.where(manifest.checkpoint, BACKUP_NAME)
        path = self._path(checkpoint, BACKUP_NAME)
        with self._reading(where):
            if not self._is_local:
                self._files.pipe_file(path, manifest.to_bytes())  # one object: whole, or not there
                return
            folder = Path(path).parent
            unfinished = folder / f".{BACKUP_NAME}.tmp"
            unfinished.write_bytes(manifest.to_bytes())
            folders = (folder / manifest.folder(index) for index in range(manifest.num_shards))
            for each in (*folders, folder.parent):  # whose name an export that broke off may have left
                sync_folder(each)
            put_in_place(unfinished, Path(path))

    def delete(self, checkpoint: str) -> None:
        """Remove a backup, its manifest first, or what an export that broke off has left."""
        with self._reading(self.where(checkpoint)):
            with suppress(FileNotFoundError):
                self._files.rm_file(self._path(checkpoint, BACKUP_NAME))
            self._files.invalidate_cache()
            self._files.rm(self._path(checkpoint), recursive=True)

    def _path(self, checkpoint: str, *names: str) -> str:
        return "/".join((self._root, folder_of(checkpoint), *names))

    @contextmanager
    def _reading(self, where: str) -> Iterator[None]:
        """Raise :class:`BackupError`, with the place, for whatever error a file system or its library has."""
        try:
            yield
        except FileNotFoundError as error:
            raise _AbsentError(f"{where} is not there") from error
        except BackupError:
            raise
        except Exception as error:
            text = error.strerror if isinstance(error, OSError) and error.strerror else f"{error!r}"
            raise BackupError(f"{where}: {escaped(text)}") from error


class _AbsentError(BackupError):
    """There is no such file."""


def folder_of(checkpoint: str, most: int | None = _LONGEST_FOLDER) -> str:
    """Return the name of a backup's folder, which is no path; raises :class:`BackupError` if it would be too long."""
    name = quote(checkpoint, safe=" ")
    if name.startswith("."):
        name = f"%2E{name[1:]}"
    if most is not None and len(name) > most:
        raise BackupError(
            f"checkpoint {shown(checkpoint)!r} has too long a name for a folder: {len(name)} bytes, and {most} are "
            "possible; take one with a shorter name"
        )
    return name


@contextmanager
def _dropped() -> Iterator[None]:
    """Ignore what fails after another error."""
    try:
        yield
    except Exception:
        return


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
